"""The frame of a lesson's figure: white paper, axes, title, legend and description."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from widgets.charts import theme
from widgets.charts.paint import resolve_colour

INK, MUTED, GRID, PAPER = (resolve_colour(c) for c in (theme.INK, theme.MUTED, theme.GRID, theme.PAPER))


def make_figure(height: int, x: str, y: str, **more: Any) -> go.Figure:
    """Returns an empty figure on white paper, which is readable on a dark page and in print, too.

    height: of the plot and its title (px)
    x, y:   the titles of the axes
    more:   more of the layout; `xaxis` and `yaxis` are added to the axes
    """
    axes = {"xaxis": theme.make_axis(x), "yaxis": theme.make_axis(y)}
    for axis in axes.values():
        axis |= {"gridcolor": GRID, "linecolor": MUTED, "tickcolor": MUTED}
    merged = {name: {**axes[name], **more.pop(name, {})} for name in axes}
    return go.Figure(layout=theme.make_layout(
        height + 80, **merged, paper_bgcolor=PAPER, plot_bgcolor=PAPER, font={"size": theme.TEXT_SIZE, "color": INK},
        margin={"l": 84, "r": 24, "t": 76, "b": 92}, showlegend=True,
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0,
                "traceorder": "normal", "font": {"size": theme.TEXT_SIZE}},
        **more,
    ))  # fmt: skip


def title_figure(figure: go.Figure, title: str, below: str, alt: str) -> go.Figure:
    """Gives the figure its title, a second line, and its description for readers who cannot see it."""
    words = {"text": f"<b>{title}</b>", "subtitle": {"text": below, "font": {"size": theme.TEXT_SIZE}}}
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "yref": "container", "pad": {"l": 12, "t": 14}}
    return figure.update_layout(title={**words, **place, "font": {"size": 17}}, meta={"alt": alt})


def fill_bar(colour: str, shape: str) -> dict[str, Any]:
    """Returns the marker of a bar."""
    pattern = {"shape": shape, "fillmode": "replace", "fgcolor": colour, "size": 6, "solidity": 0.5}
    return {"color": colour, "line": {"width": 1, "color": PAPER}, "pattern": pattern}


def curve_line(number: int, width: float) -> dict[str, Any]:
    """Returns the line of a figure's curve `number`."""
    line = theme.rank_line(number, width)
    return {**line, "color": resolve_colour(line["color"])}


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Returns a logarithmic axis with a tick per power of 10, and at 2 and 5 if `values` span less than two powers.

    Each tick shows its whole number: by itself plotly would write 20 and 50 as a small 2 and 5.
    """
    some = [v for v in values if v > 0]
    if not some or max(some) >= 100 * min(some):
        return {"type": "log", "exponentformat": "SI", "dtick": 1}
    low, high = math.floor(math.log10(min(some))) - 1, math.ceil(math.log10(max(some))) + 1
    ticks = [digit * 10.0**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "tickformat": "~s"}


def rank_axis(count: int, what: str = "rank") -> dict[str, Any]:
    """Returns an axis of `count` ranks or stages, the first at the top."""
    return {"tickvals": [*range(count)], "ticktext": [f"{what} {r}" for r in range(count)], "ticks": "",
            "range": [count - 0.5, -0.5]}  # fmt: skip
