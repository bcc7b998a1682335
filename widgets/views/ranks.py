"""Each rank's time: compute, waits for other ranks and waits for the network."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._bars import add_parts, make_bars
from widgets.views._base import Grid, Patch, View
from workbench.analysis import last_steps, per_rank
from workbench.analysis.steps.steps import break_down

LAST_STEPS = 20  # last steps in the mean
PARTS = (
    ("compute", "compute", theme.BLUE, ""),
    ("wire", "exposed transfer", theme.ORANGE, "/"),
    ("held", "exposed waiting", theme.GREY, "|"),
    ("packing", "exposed packing", theme.GREEN, "x"),
    ("other", "other", theme.SKY, "."),
)


class Ranks(View):
    """One stacked bar per rank: the parts of its mean step."""

    name: ClassVar[str] = "ranks"
    title: ClassVar[str] = "Where a step's time goes"
    about: ClassVar[str] = (
        "A stacked bar per rank: the parts of a step in milliseconds, as means of the last 20 steps. Parts: compute, "
        "stalled while data move, stalled for other ranks, stalled while the rank encodes, adds or decodes (packing), "
        "and other."
    )
    empty: ClassVar[str] = "A bar per rank appears here after the first step."
    order: ClassVar[int] = 30
    width: ClassVar[tuple[int, int]] = (4, 12)

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0

    def figure(self, run: Any) -> go.Figure:
        ranks = self.ranks(run)
        axis = theme.make_axis("ms per step", rangemode="tozero", nticks=6)
        figure = make_bars(ranks, max(210, 17 * ranks + 56), axis, right=10)
        add_parts(figure, [part[1:] for part in PARTS], "%{x:.3~g} ms")
        return figure

    def update(self, run: Any) -> Patch:
        spans, now = run.timeline.spans, time.monotonic()
        if len(spans) == self.cursor or (run.live and now - self._at < 0.5):
            return Patch()
        self.cursor, self._at = len(spans), now
        found = break_down(run.timeline, *last_steps(run.timeline, LAST_STEPS))
        if not found.steps:
            return Patch()
        rest = (found.exposed - found.held).clip(min=0)
        packing = np.minimum(found.packing, rest)
        parts = {**found._asdict(), "packing": packing, "wire": rest - packing}
        y = found.ranks.astype(np.int64)
        here = y < self.ranks(run)
        return Patch(replace={i: {"x": 1e3 * parts[key][here], "y": y[here]} for i, (key, *_) in enumerate(PARTS)})

    def table(self, run: Any) -> Grid:
        head = ("rank", "step (ms)", "compute", "exposed", "waiting", "transferring", "bytes/step", "loss")
        rows = [
            (r.rank, f"{r.step_ms:.2f}", f"{r.compute_ms:.2f}", f"{r.exposed_ms:.2f}", f"{r.waiting_ms:.2f}",
             f"{r.transferring_ms:.2f}", f"{r.nbytes:,.0f}", f"{r.loss:.4f}")
            for r in per_rank(run.timeline, *last_steps(run.timeline, LAST_STEPS))
        ]  # fmt: skip
        note = "Milliseconds per step and bytes sent, last 20 steps; waiting and transferring include hidden time"
        return Grid(head, rows, note)
