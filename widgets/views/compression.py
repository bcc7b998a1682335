"""Bytes saved and error added, step by step."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View, thin_points
from workbench.analysis import compression_ratios, last_steps, list_stretches

RATIO = 0  # the number of the trace
LINES = (  # sample, name, axis, colour, dash, symbol
    ("compression_error", "relative error", "x2", theme.VERMILLION, "solid", "circle"),
    ("residual_ratio", "left unsent / to be sent", "x2", theme.BLUE, "dash", "square"),
    ("compression_cosine", "cosine", "x3", theme.GREEN, "solid", "diamond"),
)
LOGARITHMIC = {0: "yaxis", 1: "yaxis2", 2: "yaxis2"}  # trace -> axis
GRID = [m * 10.0**e for e in range(-13, 14) for m in (1, 2, 5)]
NOT_ZERO = 1e-12  # a logarithmic axis cannot show the zeros of exact exchanges


class Compressed(View):
    """The effective ratio of every exchange. If measured, also error, residual and cosine."""

    name: ClassVar[str] = "compression"
    title: ClassVar[str] = "Bytes saved, error added"
    about: ClassVar[str] = (
        "Three charts against steps. On the left, how many times fewer bytes cross the wire than with dense fp32. In "
        "the middle, the error of the sum and the mean residual, each relative to the dense sum. On the right, the "
        "cosine between the two sums. A vertical line marks each change."
    )
    order: ClassVar[int] = 54
    axes: ClassVar[dict[str, str]] = {"x": "step", "x2": "step", "x3": "step"}
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._step = 0  # the first step whose ratio is not drawn
        self._ends: dict[str, tuple[float, float]] = {}  # by axis: least and greatest value

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=_make_layout())
        figure.add_trace(go.Scatter(
            x=[], y=[], mode="lines", showlegend=False, line={"color": theme.INK, "width": 2}, name="effective ratio",
            hovertemplate="%{y:.4~g} times fewer bytes in step %{x}<extra></extra>",
        ))  # fmt: skip
        for _, name, axis, colour, dash, symbol in LINES:
            figure.add_trace(go.Scatter(
                x=[], y=[], xaxis=axis, yaxis=axis.replace("x", "y"), mode="lines+markers", name=name,
                showlegend=axis == "x2", line={"color": colour, "dash": dash, "width": 2},
                marker={"color": colour, "symbol": symbol, "size": 7},
                hovertemplate=f"{name}: %{{y:.4~g}} in step %{{x}}<extra></extra>",
            ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        now, patch = time.monotonic(), Patch()
        if run.live and now - self._at < 0.4:
            return patch
        self._at = now
        rows = self.fresh(run.timeline.samples)
        for trace, (sample, *_) in enumerate(LINES, start=1):
            mine = rows[rows.equal("name", sample)]
            drawable = mine.value > (NOT_ZERO if trace in LOGARITHMIC else -np.inf)
            mine = mine[np.isfinite(mine.value) & drawable]
            if len(mine):
                patch.append[trace] = thin_points({"x": mine.step.astype(float), "y": mine.value})
        self._append_ratios(run, patch)
        for trace, axis in LOGARITHMIC.items():
            if trace in patch.append:
                self._extend_axis(patch, axis, patch.append[trace]["y"])
        return patch

    def _extend_axis(self, patch: Patch, axis: str, y: np.ndarray) -> None:
        """Ends an axis at round values, so that few labels suffice."""
        low, high = self._ends.get(axis, (np.inf, -np.inf))
        ends = min(low, float(y.min())), max(high, float(y.max()))
        if ends != (low, high):
            self._ends[axis] = ends
            patch.layout |= {f"{axis}.{k}": v for k, v in _round_range(*ends).items()}

    def _append_ratios(self, run: Any, patch: Patch) -> None:
        """Begins at the first compression, because earlier ratios are 1."""
        begun = next((s.first for s in list_stretches(run) if s.compressor), None)
        stop = last_steps(run.timeline)[1]
        if begun is None or stop <= max(self._step, begun):
            return
        steps, ratio = compression_ratios(run.timeline, max(self._step, begun), stop)
        self._step = stop
        if len(steps):
            patch.append[RATIO] = thin_points({"x": steps.astype(float), "y": ratio})

    def table(self, run: Any) -> Grid:
        rows = run.timeline.samples.rows()
        steps = np.unique(rows.step[rows.equal("name", LINES[0][0])])[-12:]
        out = []
        for step in steps.tolist():
            cells = [rows.value[rows.equal("name", sample) & (rows.step == step)] for sample, *_ in LINES]
            _, ratio = compression_ratios(run.timeline, step, step + 1)
            texts = [f"{float(v[-1]):.4g}" if len(v) else "" for v in (ratio, *cells)]
            out.append((step, *texts))
        head = ("step", "effective ratio", *(name for _, name, *_ in LINES))
        return Grid(head, out, "The last 12 measurements of what compression does")


def _round_range(low: float, high: float) -> dict[str, Any]:
    """Returns range and ticks of a logarithmic axis for values from `low` to `high`."""
    below = max((i for i, g in enumerate(GRID) if g <= low * (1 + 1e-9)), default=0)
    above = min((i for i, g in enumerate(GRID) if g >= high * (1 - 1e-9)), default=len(GRID) - 1)
    below -= below == above and below > 0
    low, high = (float(np.log10(GRID[i])) for i in (below, above))
    pad = 0.04 * (high - low)
    return {"range": [low - pad, high + 2 * pad], "dtick": "D2" if high - low <= 2.5 else 1}


def _make_layout() -> go.Layout:
    x = {"nticks": 4, "rangemode": "tozero"}
    log = {"type": "log", "tickformat": "~g", "exponentformat": "power", "dtick": "D2"}
    return theme.make_layout(
        250,
        xaxis=theme.make_axis("step", domain=[0, 0.27], **x),
        xaxis2=theme.make_axis("step", domain=[0.365, 0.635], anchor="y2", **x),
        xaxis3=theme.make_axis("step", domain=[0.73, 1], anchor="y3", **x),
        yaxis=theme.make_axis("times fewer bytes", **log),
        yaxis2=theme.make_axis("relative to the dense sum", anchor="x2", **log),
        yaxis3=theme.make_axis("cosine", anchor="x3", nticks=5),
        margin={"l": 76, "r": 10, "t": 8, "b": 46},
    )
