"""Bytes that each rank puts on the wire in each step."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets import theme
from widgets.views._base import Grid, Patch, View, ranks_of, thin
from workbench.analysis import bytes_per_step, last_steps


class Sent(View):
    """Payload bytes per step and rank; hand-overs are left out."""

    name: ClassVar[str] = "bytes"
    title: ClassVar[str] = "Bytes sent per step"
    about: ClassVar[str] = "Bytes that each rank sends in each step, against steps; a vertical mark at each change."
    empty: ClassVar[str] = "Bytes per step and rank appear here after the first step."
    order: ClassVar[int] = 40
    width: ClassVar[tuple[int, int]] = (4, 6)
    axes: ClassVar[dict[str, str]] = {"x": "step"}

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=theme.layout(
            250,
            xaxis=theme.axis("step", nticks=5, rangemode="tozero"),
            yaxis=theme.axis("bytes per step", rangemode="tozero", nticks=5, tickformat="~s", ticksuffix="B"),
            margin={"l": 76, "r": 8, "t": 8, "b": 44},
        ))  # fmt: skip
        for rank in range(ranks_of(run)):
            figure.add_trace(go.Scatter(
                x=[], y=[], mode="lines", showlegend=False, line=theme.rank_line(rank, 2), name=f"rank {rank}",
                hovertemplate=f"rank {rank}: %{{y:.4~s}}B in step %{{x}}<extra></extra>",
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        now = time.monotonic()
        if run.live and now - self._at < 0.4:
            return Patch()
        self._at, stop = now, last_steps(run.timeline)[1]
        if stop <= self.cursor:
            return Patch()
        sent = bytes_per_step(run.timeline, self.cursor, stop)
        x = np.arange(self.cursor, self.cursor + len(sent)).astype(float)
        self.cursor = stop
        width = min(sent.shape[1], ranks_of(run))
        return Patch(append={rank: thin({"x": x, "y": sent[:, rank].astype(float)}) for rank in range(width)})

    def table(self, run: Any) -> Grid:
        first, stop = last_steps(run.timeline, 12)
        sent = bytes_per_step(run.timeline, first, stop)
        rows = [(first + i, *(f"{v:,.0f}" for v in row)) for i, row in enumerate(sent)]
        return Grid(("step", *(f"rank {r}" for r in range(sent.shape[1]))), rows, "Bytes sent in the last 12 steps")
