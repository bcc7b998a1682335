"""Each rank's peak memory over the run."""

from __future__ import annotations

import time
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View, thin_points
from workbench.analysis import format_bytes
from workbench.analysis.resources.memory import PEAK, PREFIX

MAX_LEGEND_RANKS = 8  # single ranks in the legend, at most
UPDATE_INTERVAL = 1.0  # seconds between updates of a live run


class Peaks(View):
    """A stepped line per rank, in the rank's colour. The record has a value at each change."""

    name: ClassVar[str] = "peaks"
    title: ClassVar[str] = "Memory, step by step"
    about: ClassVar[str] = (
        "The peak of each rank's memory in a step, over all categories, as a line per rank against steps. A vertical "
        "line marks each change. Hidden until a peak changes."
    )
    order: ClassVar[int] = 27
    axes: ClassVar[dict[str, str]] = {"x": "step"}
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._changed = False
        self._lines: dict[int, _PeakLine] = {}

    def figure(self, run: Any) -> go.Figure:
        axis = theme.make_axis("peak of a step", nticks=5, rangemode="tozero", tickformat="~s", ticksuffix="B")
        figure = go.Figure(layout=theme.make_layout(
            200, xaxis=theme.make_axis("step", nticks=8, rangemode="tozero"), yaxis=axis,
            margin={"l": 84, "r": 10, "t": 8, "b": 46},
        ))  # fmt: skip
        ranks = self.ranks(run)
        for rank in range(ranks):
            figure.add_trace(go.Scatter(
                x=[], y=[], mode="lines", line={**theme.rank_line(rank, 1.5), "shape": "hv"}, meta={"rank": rank},
                name=f"rank {rank}" if ranks <= MAX_LEGEND_RANKS else "a line per rank",
                showlegend=ranks <= MAX_LEGEND_RANKS or rank == 0,
                opacity=0.75, hovertemplate=f"rank {rank}: %{{y:.4~s}}B at step %{{x}}<extra></extra>",
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        now = time.monotonic()
        if run.live and now - self._at < UPDATE_INTERVAL:
            return Patch()
        self._at = now
        rows = self.fresh(run.timeline.samples)
        rows = rows[rows.rank < self.ranks(run)]
        for rank in np.unique(rows.rank):
            mine = rows[rows.rank == rank]
            told = mine[mine.equal("name", PREFIX + PEAK)]
            line = self._lines.setdefault(int(rank), _PeakLine())
            line.told += zip(told.step.tolist(), told.value.tolist(), strict=True)
            line.newest = int(mine.step.max())
        for line in self._lines.values():
            self._changed |= line.add_steps(line.newest + (not run.live))
        if not self._changed:
            return Patch()
        new = {rank: line.take_points() for rank, line in self._lines.items() if line.x}
        return Patch(append={rank: thin_points({"x": np.array(x), "y": np.array(y)}) for rank, (x, y) in new.items()})

    def table(self, run: Any) -> Grid:
        rows = run.timeline.samples.rows()
        rows = rows[rows.equal("name", PREFIX + PEAK)]
        rows = rows[np.isin(rows.step, np.unique(rows.step)[-10:])]
        out = [(int(r), int(s), format_bytes(v)) for r, s, v in zip(rows.rank, rows.step, rows.value, strict=True)]
        return Grid(("rank", "from step", "peak"), sorted(out), "The last 10 steps at which one changed")


class _PeakLine:
    """One rank's line: the maximum of each step, continued by the last value."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []  # (step, bytes) of undrawn steps
        self.newest = 0
        self.x: list[float] = []
        self.y: list[float] = []
        self._end = self._since = 0  # the first undrawn step; the step since which `_now` holds
        self._now: float | None = None
        self._shown: float | None = None

    def add_steps(self, end: int) -> bool:
        """Adds the steps before `end`. Returns whether the line has changed its level."""
        level = True
        for step, several in groupby(self.told, itemgetter(0)):
            if step >= end:
                break
            level &= self._hold_value(step)
            values = [value for _, value in several]
            level &= self._add_point(step, max(values))
            self._since, self._now = step + 1, values[-1]
        self.told = [one for one in self.told if one[0] >= end]
        level &= self._hold_value(end)
        if self._now is not None and end > self._end:
            self._add_point(end - 1, self._shown or 0.0)
            self._end = end
        return not level

    def take_points(self) -> tuple[list[float], list[float]]:
        new, self.x, self.y = (self.x, self.y), [], []
        return new

    def _hold_value(self, step: int) -> bool:
        """Adds the last value if it holds before `step` and the line does not show it."""
        if self._now is None or step <= self._since or self._now == self._shown:
            return True
        return self._add_point(self._since, self._now)

    def _add_point(self, step: int, value: float) -> bool:
        """Returns whether the value equals the previous one."""
        before, self._shown = self._shown, value
        self.x.append(float(step))
        self.y.append(value)
        return before in (None, value)
