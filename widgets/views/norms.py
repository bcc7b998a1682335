"""Each rank's gradient norm, recorded if gradients are clipped."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View, thin_points

MAX_LEGEND_RANKS = 8  # single ranks in the legend, at most


class Norms(View):
    """A line per rank, in the rank's colour."""

    name: ClassVar[str] = "norms"
    title: ClassVar[str] = "Gradient norm"
    about: ClassVar[str] = (
        "The norm of each rank's gradient before clipping, as a line per rank against steps. The norm is of the "
        "gradient that the rank applies, so ranks that sum their gradients have equal norms. Recorded if `clip` is not "
        "0."
    )
    order: ClassVar[int] = 25
    axes: ClassVar[dict[str, str]] = {"x": "step"}
    quiet: ClassVar[bool] = True

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=theme.make_layout(
            200, xaxis=theme.make_axis("step", nticks=8, rangemode="tozero"),
            yaxis=theme.make_axis("norm", nticks=5, rangemode="tozero"), margin={"l": 60, "r": 10, "t": 8, "b": 46},
        ))  # fmt: skip
        ranks = self.ranks(run)
        for rank in range(ranks):
            figure.add_trace(go.Scatter(
                x=[], y=[], mode="lines", line=theme.rank_line(rank, 1.5), meta={"rank": rank}, opacity=0.75,
                name=f"rank {rank}" if ranks <= MAX_LEGEND_RANKS else "a line per rank",
                showlegend=ranks <= MAX_LEGEND_RANKS or rank == 0,
                hovertemplate=f"rank {rank}: %{{y:.4g}} at step %{{x}}<extra></extra>",
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        rows, patch = self.fresh(run.timeline.samples), Patch()
        rows = rows[rows.equal("name", "grad_norm") & (rows.rank < self.ranks(run))]
        for rank in np.unique(rows.rank):
            mine = rows[rows.rank == rank]
            points = thin_points({"x": mine.step.astype(float), "y": mine.value})
            patch.append[int(rank)] = points
            if len(points["x"]) < len(mine):
                patch.facts.setdefault("counts", {})[int(rank)] = len(mine)
        return patch

    def table(self, run: Any) -> Grid:
        rows = run.timeline.samples.rows()
        rows = rows[rows.equal("name", "grad_norm")]
        rows = rows[np.isin(rows.step, np.unique(rows.step)[-10:])]
        out = [(int(r), int(s), f"{v:.4g}") for r, s, v in zip(rows.rank, rows.step, rows.value, strict=True)]
        return Grid(("rank", "step", "gradient norm"), sorted(out), "The last 10 steps")
