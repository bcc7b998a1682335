"""How far the replicas are apart."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets import theme
from widgets.views._base import Grid, Patch, View, ranks_of, thin


class Drift(View):
    """Each rank's root-mean-square distance from the mean of all ranks' parameters."""

    name: ClassVar[str] = "drift"
    title: ClassVar[str] = "Replica drift"
    about: ClassVar[str] = (
        "Each rank's root-mean-square distance from the mean parameters, against steps, taken at each evaluation; "
        "zero while the ranks agree."
    )
    empty: ClassVar[str] = "How far the ranks' parameters are apart appears here at the first evaluation."
    order: ClassVar[int] = 50
    width: ClassVar[tuple[int, int]] = (4, 6)
    axes: ClassVar[dict[str, str]] = {"x": "step"}

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=theme.layout(
            250,
            xaxis=theme.axis("step", nticks=5, rangemode="tozero"),
            yaxis=theme.axis("RMS distance", rangemode="nonnegative", nticks=5, exponentformat="power"),
            margin={"l": 76, "r": 8, "t": 8, "b": 44},
        ))  # fmt: skip
        for rank in range(ranks_of(run)):
            figure.add_trace(go.Scatter(
                x=[], y=[], mode="lines+markers", showlegend=False, line=theme.rank_line(rank), name=f"rank {rank}",
                marker={"symbol": theme.rank_symbol(rank), "size": 6},
                hovertemplate=f"rank {rank}: %{{y:.3g}} at step %{{x}}<extra></extra>",
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        rows, patch = self.fresh(run.timeline.samples), Patch()
        rows = rows[rows.equal("name", "drift") & (rows.rank < ranks_of(run))]
        for rank in np.unique(rows.rank):
            mine = rows[rows.rank == rank]
            patch.append[int(rank)] = thin({"x": mine.step.astype(float), "y": mine.value}, 400)
        return patch

    def table(self, run: Any) -> Grid:
        rows = run.timeline.samples.rows()
        rows = rows[rows.equal("name", "drift")]
        last = rows[np.isin(rows.step, np.unique(rows.step)[-10:])]
        cells = [(int(s), int(r), f"{v:.4g}") for s, r, v in zip(last.step, last.rank, last.value, strict=True)]
        return Grid(("step", "rank", "RMS distance"), sorted(cells), "Drift at the last 10 evaluations")
