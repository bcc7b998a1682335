"""One stacked bar per rank: what two views draw of different things."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from widgets.charts import theme


def stacked(ranks: int, height: int, axis: dict[str, Any], right: int) -> go.Figure:
    """An empty figure with a line per rank; `right` is its margin there, in pixels."""
    return go.Figure(layout=theme.layout(
        height,
        barmode="stack",
        bargap=0.3,
        xaxis=axis,
        yaxis=theme.axis("", autorange="reversed", ticks="", showgrid=False,
                         tickvals=list(range(ranks)), ticktext=[f"rank {r}" for r in range(ranks)]),
        margin={"l": 60, "r": right, "t": 4, "b": 44},
    ))  # fmt: skip


def add_parts(figure: go.Figure, parts: Iterable[tuple[str, str, str]], told: str, unlisted: str = "") -> None:
    """Adds what each bar is made of: (name, colour, pattern). told: a value as it is shown under the pointer."""
    for name, colour, shape in parts:
        pattern = {"shape": shape, "fillmode": "replace", "fgcolor": colour, "size": 6, "solidity": 0.5}
        figure.add_trace(go.Bar(
            x=[], y=[], orientation="h", name=name, showlegend=name != unlisted,
            hovertemplate=f"%{{y}}, {name}: {told}<extra></extra>",
            marker={"color": colour, "line": {"width": 1, "color": theme.PAPER}, "pattern": pattern},
        ))  # fmt: skip
