"""Bytes that each rank sends: a mean per step since its previous exchange.

Exchanges may be rare. A point for every step would then jump between 0 and the whole.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View, thin_points
from workbench.analysis import bytes_per_step, last_steps, sent_bytes


class BytesSent(View):
    """Payload bytes of each exchange over the steps before it. Excludes hand-overs."""

    name: ClassVar[str] = "bytes"
    title: ClassVar[str] = "Bytes sent per step"
    about: ClassVar[str] = (
        "Bytes that each rank sends per step, against steps. Each step in which a rank sends has a point: the mean "
        "over the steps since it sent before. A vertical line marks each change."
    )
    empty: ClassVar[str] = "Bytes per step and rank appear here after the first exchange."
    order: ClassVar[int] = 40
    width: ClassVar[tuple[int, int]] = (4, 6)
    axes: ClassVar[dict[str, str]] = {"x": "step"}

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._sent: dict[int, int] = {}  # by rank, the last step in which it sent

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=theme.make_layout(
            250,
            xaxis=theme.make_axis("step", nticks=5, rangemode="tozero"),
            yaxis=theme.make_axis("bytes per step", rangemode="tozero", nticks=5, tickformat="~s", ticksuffix="B"),
            margin={"l": 76, "r": 8, "t": 8, "b": 44},
        ))  # fmt: skip
        for rank in range(self.ranks(run)):
            figure.add_trace(go.Scatter(
                x=[], y=[], mode="lines", showlegend=False, line=theme.rank_line(rank, 2),
                meta={"rank": rank}, name=f"rank {rank}",
                hovertemplate=f"rank {rank}: %{{y:.4~s}}B per step up to step %{{x}}<extra></extra>",
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        now = time.monotonic()
        if run.live and now - self._at < 0.4:
            return Patch()
        self._at, stop = now, last_steps(run.timeline)[1]
        if stop <= self.cursor:
            return Patch()
        first, self.cursor = self.cursor, stop
        sent, patch = bytes_per_step(run.timeline, first, stop), Patch()
        for rank in range(min(sent.shape[1], self.ranks(run))):
            steps, mean = sent_bytes(sent[:, rank], first, self._sent.get(rank, -1))
            if len(steps):
                self._sent[rank] = int(steps[-1])
                patch.append[rank] = thin_points({"x": steps.astype(float), "y": mean})
        return patch

    def table(self, run: Any) -> Grid:
        first, stop = last_steps(run.timeline, 12)
        sent = bytes_per_step(run.timeline, first, stop)
        rows = [(first + i, *(f"{v:,.0f}" for v in row)) for i, row in enumerate(sent)]
        return Grid(("step", *(f"rank {r}" for r in range(sent.shape[1]))), rows, "Bytes sent in the last 12 steps")
