"""The contents of each rank's memory: a stacked bar of categories, and the peak of their sum."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._bars import add_parts, make_bars
from widgets.views._base import Grid, Patch, View
from workbench.analysis import RankMemory, format_bytes, last_steps, measure_memory
from workbench.analysis.resources.memory import AWAY, PASSING

LAST_STEPS = 20  # last steps for the maxima
PARTS = (
    ("parameters", theme.BLUE, ""),
    ("gradients", theme.ORANGE, "/"),
    ("optimizer state", theme.GREEN, "x"),
    ("activations", theme.SKY, ""),
    ("batches", theme.SKY, "/"),
    ("evaluation", theme.YELLOW, ""),
    ("strategy state", theme.PURPLE, "."),
    ("compressor state", theme.VERMILLION, "-"),
    ("buffers in flight", theme.GREY, "|"),
    (PASSING, theme.GREY, "/"),
)
MARKED = (("peak of all together", "line-ns-open", 20), ("GPU's allocator", "diamond-open", 12),
          (AWAY[0], "triangle-up-open", 12), (AWAY[1], "triangle-down-open", 12))  # fmt: skip
OTHER = ("other", theme.YELLOW, "x")  # for unknown categories


class Memory(View):
    """One stacked bar per rank, in bytes. A stroke marks the peak of the sum."""

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "What fills the memory"
    about: ClassVar[str] = (
        "A stacked bar of bytes per rank. Its parts: parameters, gradients, optimizer state, activations kept for "
        "backward, batches, evaluation, strategy state, compressor state, buffers in flight, and transient memory such "
        "as gradients between two layers. Each part is its largest value in a step, of the last 20 steps. The parts "
        "peak at different times, so a stroke marks the peak of their sum. A diamond is the figure of the GPU's "
        "allocator. Triangles are bytes outside the device: up for host memory, down for disk."
    )
    empty: ClassVar[str] = "A bar per rank appears here after the first step."
    order: ClassVar[int] = 15
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0

    def figure(self, run: Any) -> go.Figure:
        ranks = self.ranks(run)
        axis = theme.make_axis("most in a step", rangemode="tozero", nticks=8, tickformat="~s", ticksuffix="B")
        figure = make_bars(ranks, max(170, 17 * ranks + 70), axis, right=24)
        add_parts(figure, (*PARTS, OTHER), "%{x:.4~s}B", unlisted="other")
        for name, symbol, size in MARKED:
            figure.add_trace(go.Scatter(
                x=[], y=[], mode="markers", name=name, meta={"rare": name != MARKED[0][0]},
                hovertemplate=f"%{{y}}, {name}: %{{x:.4~s}}B<extra></extra>",
                marker={"symbol": symbol, "size": size, "color": theme.INK, "line": {"width": 3, "color": theme.INK}},
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        samples, now = run.timeline.samples, time.monotonic()
        if len(samples) == self.cursor or (run.live and now - self._at < 0.5):
            return Patch()
        self.cursor, self._at = len(samples), now
        found = [m for m in self._measure_memory(run) if m.rank < self.ranks(run)]
        if not found:
            return Patch()
        y = np.array([m.rank for m in found], np.int64)
        known = [name for name, *_ in PARTS]
        rows = [[m.most.get(name, 0) for m in found] for name in known]
        rows.append([sum(v for name, v in m.most.items() if name not in (*known, *AWAY)) for m in found])
        patch = Patch(replace={i: {"x": np.array(row, float), "y": y} for i, row in enumerate(rows)})
        patch.replace[len(rows)] = {"x": np.array([m.peak for m in found], float), "y": y}
        if beside := [m for m in found if m.allocated_peak]:
            at = np.array([m.rank for m in beside], np.int64)
            patch.replace[len(rows) + 1] = {"x": np.array([m.allocated_peak for m in beside], float), "y": at}
        for number, where in enumerate(AWAY, len(rows) + 2):
            kept = [m for m in found if m.most.get(where)]
            at = np.array([m.rank for m in kept], np.int64)
            patch.replace[number] = {"x": np.array([m.most[where] for m in kept], float), "y": at}
        return patch

    def table(self, run: Any) -> Grid:
        found = self._measure_memory(run)
        names = list(dict.fromkeys(name for m in found for name in m.most))
        cells = [
            (m.rank, *(format_bytes(m.most.get(n, 0)) for n in names), format_bytes(m.peak), _format_peak(m))
            for m in found
        ]
        note = "Most in a step, last 20 steps; peak: of the sum; GPU: its allocator's figure"
        return Grid(("rank", *names, "peak", "GPU"), cells, note)

    def _measure_memory(self, run: Any) -> list[RankMemory]:
        return measure_memory(run.timeline, *last_steps(run.timeline, LAST_STEPS))


def _format_peak(found: RankMemory) -> str:
    return format_bytes(found.allocated_peak) if found.allocated_peak else ""
