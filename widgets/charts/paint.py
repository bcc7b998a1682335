"""Paints the live charts' figures (`views._base.draw_view`) with matplotlib, without a browser."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from widgets.charts import theme

STANDINS = {theme.INK: "#1a1a1a", theme.MUTED: "#565656", theme.FAINT: "#8c8c8c", theme.GRID: "#e0e0e0",
            theme.PAPER: "#ffffff"}  # fmt: skip
HATCHES = {"": "", "/": "////", "\\": "\\" * 4, "|": "||||", "-": "----", ".": "....", "x": "xxxx"}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X", "star": "*",
           "triangle-down": "v"}  # fmt: skip
DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 3)), "dot": (0, (1, 2)), "dashdot": "-.",
                          "longdash": (0, (9, 3)), "longdashdot": (0, (9, 3, 1, 3))}  # fmt: skip


def resolve_colour(value: Any) -> str:
    """Returns a colour for matplotlib; a stand-in's is that of a light page."""
    return STANDINS.get(str(value), str(value))


def paint_panel(axes: Axes, figure: Any, panel: str = "x") -> list[Any]:
    """Paints one panel ("x" or "x2") of `figure`. Returns entries for a legend."""
    listed = []
    for trace in figure.data:
        if (trace.xaxis or "x") != panel or trace.x is None or not len(trace.x):
            continue
        key = (
            _paint_bars(axes, trace)
            if trace.type == "bar"
            else _paint_boxes(axes, trace)
            if trace.fill
            else _paint_line(axes, trace)
        )
        if trace.showlegend is not False:
            listed.append(key)
    _dress_axes(axes, figure.layout, panel)
    return listed


def _paint_line(axes: Axes, trace: Any) -> Any:
    dash = trace.line.dash or "solid"
    (line,) = axes.plot(
        trace.x, trace.y, label=trace.name, color=resolve_colour(trace.line.color), linewidth=trace.line.width or 1.5,
        alpha=trace.opacity, linestyle=DASHES.get(dash) or (0, tuple(float(n.strip("px")) for n in dash.split(","))),
        marker=MARKERS.get(trace.marker.symbol or "circle") if "markers" in trace.mode else None,
        markersize=0.8 * (trace.marker.size or 6),
    )  # fmt: skip
    return line


def _paint_boxes(axes: Axes, trace: Any) -> Any:
    """Paints closed outlines with gaps, 6 points per box."""
    x, y = (np.asarray(v, float).reshape(-1, 6)[:, :4] for v in (trace.x, trace.y))
    look = _choose_look(trace.fillpattern.shape if trace.fillpattern else "", trace.fillcolor)
    look |= (
        {"linewidth": 0.5} if look.get("hatch") else {"linewidth": 0.5, "edgecolor": resolve_colour(trace.line.color)}
    )
    corners: Any = np.stack([x, y], axis=2)  # one array, although the type stub wants a list
    axes.add_collection(PolyCollection(corners, **look), autolim=False)
    return Patch(label=trace.name, **look)


def _paint_bars(axes: Axes, trace: Any) -> Any:
    left = np.zeros(len(trace.x))
    for other in axes.containers:
        left += [bar.get_width() for bar in other]
    look = _choose_look(trace.marker.pattern.shape, trace.marker.color)
    axes.barh(trace.y, trace.x, left=left, height=0.7, linewidth=0.5, **look)
    return Patch(label=trace.name, linewidth=0.5, **look)


def _choose_look(shape: str | None, fill: Any) -> dict[str, Any]:
    hatch, fill = HATCHES[shape or ""], resolve_colour(fill)
    return {"hatch": hatch, "facecolor": "none", "edgecolor": fill} if hatch else {"facecolor": fill, "edgecolor": fill}


def _dress_axes(axes: Axes, layout: Any, panel: str) -> None:
    x, y = layout["xaxis" + panel[1:]], layout["yaxis" + panel[1:]]
    axes.set_xlabel(x.title.text or "")
    axes.set_ylabel(y.title.text or "")
    if x.range:
        axes.set_xlim(*x.range)
    elif x.rangemode == "tozero":
        axes.set_xlim(left=0)
    if y.range:
        axes.set_ylim(*y.range)
    elif y.autorange == "reversed":
        axes.invert_yaxis()
    elif y.rangemode in ("tozero", "nonnegative"):
        axes.set_ylim(bottom=0)
    if y.tickvals is not None:
        axes.set_yticks(list(y.tickvals), [_strip_bold(t) for t in y.ticktext])
        axes.tick_params(axis="y", length=0)
    elif y.tickformat == "~s":
        axes.yaxis.set_major_formatter(EngFormatter(unit=y.ticksuffix or ""))
    axes.xaxis.set_major_locator(MaxNLocator(x.nticks or 6, integer=x.title.text == "step"))
    for side, of in ((axes.xaxis, x), (axes.yaxis, y)):
        if of.showgrid is not False:
            side.grid(color=resolve_colour(theme.GRID), linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom" or (name == "left" and y.showline is not False))
        spine.set_color(resolve_colour(theme.MUTED))


def _strip_bold(text: str) -> str:
    return text.replace("<b>", "").replace("</b>", "")
