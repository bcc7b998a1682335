"""The distance between the replicas, and the steps since their last averaging."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View, ranks_of, thin_points
from workbench.analysis import since_met


class Drift(View):
    """Each rank's root-mean-square distance from the mean of all ranks' parameters."""

    name: ClassVar[str] = "drift"
    title: ClassVar[str] = "Replica drift"
    about: ClassVar[str] = (
        "Each rank's root-mean-square distance from the mean parameters at each evaluation, against steps. It is zero "
        "if the ranks agree. If ranks meet only every few steps, the points are not joined. The axis then says how "
        "many steps after an averaging they were taken."
    )
    empty: ClassVar[str] = "The distance between the ranks' parameters appears here at the first evaluation."
    order: ClassVar[int] = 50
    width: ClassVar[tuple[int, int]] = (4, 6)
    axes: ClassVar[dict[str, str]] = {"x": "step"}

    def __init__(self) -> None:
        super().__init__()
        self._since: set[int] = set()  # of all unconnected points

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=theme.make_layout(
            250,
            xaxis=theme.make_axis("step", nticks=5, rangemode="tozero"),
            yaxis=theme.make_axis("RMS distance", rangemode="nonnegative", nticks=5, exponentformat="power"),
            margin={"l": 76, "r": 8, "t": 8, "b": 44},
        ))  # fmt: skip
        for mode in ("lines+markers", "markers"):
            for rank in range(ranks_of(run)):
                line = theme.rank_line(rank)
                figure.add_trace(go.Scatter(
                    x=[], y=[], mode=mode, showlegend=False, line=line, name=f"rank {rank}", meta={"rank": rank},
                    marker={"symbol": theme.rank_symbol(rank), "size": 6, "color": line["color"]},
                    hovertemplate=f"rank {rank}: %{{y:.3g}} at step %{{x}}<extra></extra>",
                ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        rows, patch = self.fresh(run.timeline.samples), Patch()
        rows = rows[rows.equal("name", "drift") & (rows.rank < ranks_of(run))]
        since, length = since_met(run.timeline, rows.step)
        within = length > 1
        for rank in np.unique(rows.rank):
            for single in (False, True):
                mine = rows[(rows.rank == rank) & (within == single)]
                if len(mine):
                    trace = int(rank) + single * ranks_of(run)
                    patch.append[trace] = thin_points({"x": mine.step.astype(float), "y": mine.value}, 400)
        if within.any():
            self._since |= set(since[within].tolist())
            patch.layout["xaxis.title.text"] = f"step<br>points: {_describe_points(self._since)}"
            patch.layout["margin.b"] = 64
        return patch

    def table(self, run: Any) -> Grid:
        rows = run.timeline.samples.rows()
        rows = rows[rows.equal("name", "drift")]
        last = rows[np.isin(rows.step, np.unique(rows.step)[-10:])]
        since = (str(k) if k >= 0 else "" for k in since_met(run.timeline, last.step)[0].tolist())
        columns = zip(last.step, last.rank, last.value, since, strict=True)
        cells = [(int(s), int(r), f"{v:.4g}", k) for s, r, v, k in columns]
        head = ("step", "rank", "RMS distance", "steps since the ranks met")
        return Grid(head, sorted(cells), "Drift at the last 10 evaluations")


def _describe_points(since: set[int]) -> str:
    """Describes how many steps after averaging the points were taken.

    >>> _describe_points({0, 4}), _describe_points({0}), _describe_points({1, 3, 5, 7})
    ('0 or 4 steps after averaging', 'just after averaging', '1 to 7 steps after averaging')
    """
    if since == {0}:
        return "just after averaging"
    told = sorted(since)
    some = " or ".join(map(str, told)) if len(told) < 3 else f"{told[0]} to {told[-1]}"
    return f"{some} steps after averaging"
