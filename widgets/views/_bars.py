"""One stacked bar per rank, as two views draw it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from widgets.charts import theme


def make_bars(ranks: int, height: int, axis: dict[str, Any], right: int) -> go.Figure:
    """Returns an empty figure with a row per rank. right: the right margin in pixels"""
    return go.Figure(layout=theme.make_layout(
        height,
        barmode="stack",
        bargap=0.3,
        xaxis=axis,
        yaxis=theme.make_axis("", autorange="reversed", ticks="", showgrid=False,
                         tickvals=list(range(ranks)), ticktext=[f"rank {r}" for r in range(ranks)]),
        margin={"l": 60, "r": right, "t": 4, "b": 44},
    ))  # fmt: skip


def add_parts(figure: go.Figure, parts: Iterable[tuple[str, str, str]], told: str, unlisted: str = "") -> None:
    """Adds the parts of each bar: (name, colour, pattern). told: the format of a value under the pointer"""
    for name, colour, shape in parts:
        pattern = {"shape": shape, "fillmode": "replace", "fgcolor": colour, "size": 6, "solidity": 0.5}
        figure.add_trace(go.Bar(
            x=[], y=[], orientation="h", name=name, showlegend=name != unlisted,
            hovertemplate=f"%{{y}}, {name}: {told}<extra></extra>",
            marker={"color": colour, "line": {"width": 1, "color": theme.PAPER}, "pattern": pattern},
        ))  # fmt: skip
