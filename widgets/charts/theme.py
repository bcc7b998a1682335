"""Colours, hatches and plain layouts of all charts.

The page replaces INK, MUTED, FAINT, GRID and PAPER by colours of its light or dark theme. Other colours are Okabe and
Ito's palette. Colour is never the only difference between 2 categories.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

INK, MUTED, FAINT, GRID, PAPER = "#010101", "#5f5f61", "#9b9b9d", "#d9d9db", "#fefefe"
SKY, BLUE, GREEN, ORANGE = "#56B4E9", "#0072B2", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#8c8c8c"
TEXT_SIZE = 14  # px, the smallest text

_RANK_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY, INK)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")


def rank_line(rank: int, width: float = 1.5) -> dict[str, Any]:
    """Returns a rank's line. Colour and dash together are unique up to 64 ranks."""
    n = len(_RANK_COLOURS)
    return {"color": _RANK_COLOURS[rank % n], "dash": _DASHES[(rank + rank // n) % n], "width": width}


def rank_symbol(rank: int) -> str:
    """Returns a rank's marker."""
    return _SYMBOLS[rank % len(_SYMBOLS)]


def make_layout(height: int, **more: Any) -> go.Layout:
    """Returns a plain layout with 14 px text. It has no template, title or legend."""
    base: dict[str, Any] = {
        "template": go.layout.Template(),
        "height": height,
        "margin": {"l": 74, "r": 14, "t": 8, "b": 46},
        "font": {"size": TEXT_SIZE, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"font": {"size": TEXT_SIZE}},
        "hovermode": "closest",
        "showlegend": False,  # the page writes it
        "uirevision": "keep",
    }
    return go.Layout(**{**base, **more})


def make_axis(title: str, **more: Any) -> dict[str, Any]:
    """Returns an axis. title: includes the unit"""
    base: dict[str, Any] = {
        "title": {"text": title, "standoff": 8, "font": {"size": TEXT_SIZE}},
        "tickfont": {"size": TEXT_SIZE},
        "gridcolor": GRID,
        "linecolor": MUTED,
        "zeroline": False,
        "showline": True,
        "ticks": "outside",
        "tickcolor": MUTED,
        "ticklen": 4,
        "automargin": False,
    }
    return {**base, **more}
