"""A heat map of ranks by steps: how late each rank meets the other ranks."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Grid, Patch, View
from workbench.analysis import LatenessStrips, step_times

MIN_SCALE_END = 0.2  # share of a step: the scale's least end, so that noise stays pale
SCALE_SHARE = 0.95  # share of the columns within the scale, so that one long pause does not set it
CELL_BYTES = 9  # bytes of a cell in a message
BYTES_PER_SECOND = 20_000  # bytes per second, on average
WAYS = (1.0, 2.0, 5.0, 10.0)  # a scale ends at one of these times a power of 10


class Late(View):
    """A cell per rank and stretch of steps. Late ranks have strong colours."""

    name: ClassVar[str] = "lateness"
    title: ClassVar[str] = "Late ranks"
    about: ClassVar[str] = (
        "A heat map of ranks against steps. A stronger colour means that the rank came later to the step's last "
        "collective. Lateness is in milliseconds after the median of the other ranks, without the rank's own stalls. A "
        "row that stays coloured is a slow rank. A single coloured cell is a pause. A grey cell is a step in which the "
        "rank met no other rank. If ranks meet every few steps, a meeting counts for its whole round. In a long run a "
        "column is the mean of several steps. A slow link makes no rank late. The line about the straggler names it."
    )
    order: ClassVar[int] = 17
    axes: ClassVar[dict[str, str]] = {"x": "step"}
    quiet: ClassVar[bool] = True
    tells: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._at, self._again = 0.0, 1.0
        self._strips: LatenessStrips | None = None

    def figure(self, run: Any) -> go.Figure:
        ranks = self.ranks(run)
        figure = go.Figure(layout=theme.make_layout(
            max(160, 17 * ranks + 96),
            xaxis=theme.make_axis("step", nticks=8, showgrid=False),
            yaxis=theme.make_axis("", ticks="", showgrid=False, **_make_ticks(ranks)),
            plot_bgcolor=theme.GRID,
            coloraxis={
                "colorscale": [[0, theme.PAPER], [1, theme.VERMILLION]], "cmin": 0, "cmax": 1,
                "colorbar": {"title": {"text": "ms late", "side": "right", "font": {"size": theme.TEXT_SIZE}},
                             "nticks": 4, "tickfont": {"size": theme.TEXT_SIZE}, "thickness": 14, "outlinewidth": 1,
                             "outlinecolor": theme.MUTED, "x": 1.0, "xpad": 8, "ypad": 0},
            },
            margin={"l": 66, "r": 92, "t": 24, "b": 64},
        ))  # fmt: skip
        figure.add_trace(go.Heatmap(
            x=[], y=[], z=[], coloraxis="coloraxis", ygap=2, hoverongaps=False,
            hovertemplate="rank %{y}: %{z:.3~g} ms late about step %{x:.0f}<extra></extra>",
        ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        now, spans = time.monotonic(), len(run.timeline.spans)
        if spans == self.cursor or (run.live and now - self._at < self._again):
            return Patch()
        self.cursor, self._at = spans, now
        if self._strips is None:
            self._strips = LatenessStrips(self.ranks(run))
        strips = self._strips
        if not strips.add_steps(run.timeline, held_back=int(run.live)):
            return Patch()
        seconds = strips.seconds
        n, p = seconds.shape
        self._again = max(1.0, n * p * CELL_BYTES / BYTES_PER_SECOND)
        cells = {"x": np.repeat(strips.steps, p), "y": np.tile(np.arange(p), n), "z": 1e3 * seconds.ravel()}
        step = float(np.nanmedian(step_times(run.timeline, LatenessStrips.LAST).seconds))
        title = f"step<br>{self._describe_latest(strips.recent)}"
        return Patch(
            {}, {0: cells}, {"coloraxis.cmax": _scale_end(1e3 * seconds, 1e3 * step), "xaxis.title.text": title}
        )

    def _describe_latest(self, recent: np.ndarray) -> str:
        late = _median_known(recent)
        rank = int(np.nanargmax(late))
        latest = f"rank {rank}, {_format_ms(late[rank])} ms" if _format_ms(late[rank]) != "0" else "none"
        return f"stronger colour: later. Latest in the last {_count_meetings(len(recent))}: {latest}"

    def table(self, run: Any) -> Grid:
        strips = self._strips or LatenessStrips(self.ranks(run))
        if strips is not self._strips:
            strips.add_steps(run.timeline, held_back=int(run.live))
        columns = _median_known(strips.recent), strips.mean, strips.most
        there = np.flatnonzero(~np.isnan(strips.most))
        rows = [(int(r), *(_format_ms(c[r]) for c in columns), int(strips.most_at[r])) for r in there]
        head = ("rank", f"median of the last {LatenessStrips.LAST} meetings (ms)", "mean of all", "most", "in step")
        return Grid(head, rows, "Milliseconds later than the median of the other ranks; negative: earlier")


def _make_ticks(ranks: int) -> dict[str, Any]:
    every = max(1, -(-ranks // 32))
    shown = list(range(0, ranks, every))
    texts = [f"rank {r}" for r in shown]
    return {"tickvals": shown, "ticktext": texts, "range": [ranks - 0.5, -0.5], "autorange": False}


def _median_known(rows: np.ndarray) -> np.ndarray:
    """Returns `(p,)` medians over each rank's meetings. NaN without a meeting."""
    out, some = np.full(rows.shape[1], np.nan), ~np.isnan(rows).all(axis=0)
    out[some] = np.nanmedian(rows[:, some], axis=0)
    return out


def _scale_end(cells: np.ndarray, step: float) -> float:
    """Returns the end of the colour scale in ms: a round number that covers most columns.

    >>> _scale_end(np.array([[0.0, 31.0], [0.0, 29.0]]), 100.0), _scale_end(np.zeros((3, 2)), 100.0)
    (50.0, 20.0)
    """
    columns = np.fmax.reduce(np.nan_to_num(cells), axis=1)
    end = max(float(np.quantile(columns, SCALE_SHARE)), MIN_SCALE_END * step, 1e-3)
    power = 10.0 ** np.floor(np.log10(end))
    return float(next(way * power for way in WAYS if way * power >= end * (1 - 1e-9)))


def _count_meetings(n: int) -> str:
    return f"{n} meetings" if n > 1 else "meeting"


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if abs(seconds) >= 5e-6 else "0"
