"""The loss over steps and over seconds. Fewer steps may take more seconds."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View, thin_points

MAX_LEGEND_RANKS = 8  # single ranks in the legend, at most


class Loss(View):
    """The consolidated model's held-out loss as a thick line; each rank's training loss as a thin line."""

    name: ClassVar[str] = "loss"
    title: ClassVar[str] = "Loss"
    about: ClassVar[str] = (
        "Loss against steps on the left and against seconds on the right. A thick line with markers is the held-out "
        "loss of the consolidated model. A thin line is the training loss of a rank. A vertical line marks each "
        "change, a diamond each checkpoint."
    )
    empty: ClassVar[str] = "The loss appears here after the first step."
    order: ClassVar[int] = 20
    axes: ClassVar[dict[str, str]] = {"x": "step", "x2": "t"}
    labelled: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._saved = 0  # checkpoints so far

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=_make_layout())
        for panel in ("x", "x2"):
            for rank in range(self.ranks(run)):
                figure.add_trace(_training_trace(rank, panel, self.ranks(run)))
        for panel in ("x", "x2"):
            figure.add_trace(_held_out(panel))
        for panel in ("x", "x2"):
            figure.add_trace(_checkpoint_trace(panel))
        return figure

    def update(self, run: Any) -> Patch:
        rows, patch = self.fresh(run.timeline.samples), Patch()
        ranks = self.ranks(run)
        loss = rows.equal("name", "loss")
        found = [rows[loss & (rows.rank == r)] for r in range(ranks)] + [rows[rows.equal("name", "held_out")]]
        for place, mine in enumerate(found):
            if not len(mine):
                continue
            for panel, x in ((0, mine.step.astype(float)), (1, mine.t)):
                trace = panel * ranks + place if place < ranks else 2 * ranks + panel
                points = thin_points({"x": x, "y": mine.value})
                patch.append[trace] = points
                if len(points["x"]) < len(mine):
                    patch.facts.setdefault("counts", {})[trace] = len(mine)
        if patch:
            patch.facts["newest"] = float(rows.t.max())
        saved = [(d["step"], t, d["held_out"]) for _, t, d in run.details("saved") if d.get("held_out") is not None]
        if len(saved) > self._saved:
            self._saved = len(saved)
            step, seconds, held_out = np.array(saved, float).T
            patch.replace |= {2 * ranks + 2: {"x": step, "y": held_out}, 2 * ranks + 3: {"x": seconds, "y": held_out}}
        return patch

    def table(self, run: Any) -> Grid:
        rows = run.timeline.samples.rows()
        held = rows[rows.equal("name", "held_out")]
        loss = rows[rows.equal("name", "loss")]
        last = np.unique(loss.step)[-10:]
        out: list[tuple[Any, ...]] = [
            ("held-out", int(s), f"{t:.2f}", f"{v:.4f}")
            for s, t, v in zip(held.step[-40:], held.t[-40:], held.value[-40:], strict=True)
        ]
        for rank in np.unique(loss.rank):
            for i in np.flatnonzero((loss.rank == rank) & np.isin(loss.step, last)):
                out.append((f"training, rank {rank}", int(loss.step[i]), f"{loss.t[i]:.2f}", f"{loss.value[i]:.4f}"))
        note = "The last 40 held-out losses; training loss of the last 10 steps"
        return Grid(("loss", "step", "time (s)", "value"), out, note)


def _make_layout() -> go.Layout:
    x = {"nticks": 8, "rangemode": "tozero"}
    return theme.make_layout(
        300,
        xaxis=theme.make_axis("step", domain=[0, 0.487], **x),
        xaxis2=theme.make_axis("time since the run began (s)", domain=[0.513, 1], anchor="y2", **x),
        yaxis=theme.make_axis("loss", nticks=6),
        yaxis2=theme.make_axis("", matches="y", anchor="x2", showticklabels=False, nticks=6),
        margin={"l": 60, "r": 10, "t": 8, "b": 46},
    )


def _training_trace(rank: int, panel: str, ranks: int) -> go.Scatter:
    """The legend lists each rank, or all of many ranks once."""
    name = f"training loss, rank {rank}" if rank == 0 else f"rank {rank}"
    return go.Scatter(
        x=[], y=[], xaxis=panel, yaxis=panel.replace("x", "y"), mode="lines", opacity=0.75,
        line=theme.rank_line(rank, 1), meta={"rank": rank},
        name=name if ranks <= MAX_LEGEND_RANKS else "training loss, a line per rank",
        showlegend=panel == "x" and (ranks <= MAX_LEGEND_RANKS or rank == 0),
        hovertemplate=f"rank {rank} training: %{{y:.4f}}<extra></extra>",
    )  # fmt: skip


def _held_out(panel: str) -> go.Scatter:
    return go.Scatter(
        x=[], y=[], xaxis=panel, yaxis=panel.replace("x", "y"), mode="lines+markers",
        line={"color": theme.INK, "width": 2.5}, marker={"size": 7, "color": theme.INK},
        name="held-out loss, consolidated model", showlegend=panel == "x",
        hovertemplate="held-out: %{y:.4f} at %{x:.6~g}<extra></extra>",
    )  # fmt: skip


def _checkpoint_trace(panel: str) -> go.Scatter:
    return go.Scatter(
        x=[], y=[], xaxis=panel, yaxis=panel.replace("x", "y"), mode="markers", showlegend=False, name="checkpoint",
        marker={"symbol": "diamond-open", "size": 13, "color": theme.INK, "line": {"width": 2}},
        hovertemplate="a checkpoint, at %{x:.6~g}<extra></extra>",
    )  # fmt: skip
