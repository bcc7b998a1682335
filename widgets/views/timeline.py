"""The timeline: a row per rank with a lane for compute and a lane for communication.

It shows whole steps: chosen ones, or the last few that ended on all ranks. It draws long steps while they grow.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.charts.boxes import KINDS, Boxes, add_path, boxes_of
from widgets.views._base import Grid, Patch, View, ranks_of
from workbench.analysis import critical_path, list_stretches
from workbench.analysis.steps.collectives import last_arrivals, send_rates
from workbench.record.timeline import Rows

MAX_BOXES = 3000  # per kind, at most
SLOW_STEP = 0.2  # seconds; slower steps are shown while they grow
MAX_PATH_RANKS = 16  # ranks: a live path of more takes too long
MAX_ROW_DELAY = 1.0  # seconds for which a rank without rows delays the chart


class Timeline(View):
    """The spans of all ranks in a window of whole steps."""

    name: ClassVar[str] = "timeline"
    title: ClassVar[str] = "What each rank does"
    about: ClassVar[str] = (
        "A row per rank. The upper lane shows forward, backward and update. It also shows stalls, for another stage of "
        "a pipeline (its bubble) or for another reason (exposed). The lower lane shows each collective: thin and "
        "hatched if it waits for other ranks, solid if it transfers. A line between the lanes marks the critical path: "
        "the work that the step waited for, from begin to end."
    )
    empty: ClassVar[str] = "A row per rank appears here after the first step: compute above, communication below."
    order: ClassVar[int] = 10
    axes: ClassVar[dict[str, str]] = {"x": "t"}
    tools: ClassVar[str] = "steps"
    labelled: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.at: int | None = None  # the first step; None to follow
        self.steps: int | None = None  # their number; None: by their length
        self._ended: dict[int, int] = {}  # by rank, the last step that ended
        self._heard: dict[int, float] = {}  # by rank, the end of its newest span
        self._seconds = 0.1  # of the newest step
        self._shown: tuple[Any, ...] = ()

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=_make_layout(self.ranks(run)))
        for kind in KINDS:
            figure.add_trace(kind.make_trace())
        return figure

    def ask(self, request: dict[str, Any]) -> None:
        """Handles `at` (the first step; None: follow) and `steps` (their number; None: automatic)."""
        if "at" in request:
            self.at = None if request["at"] is None else max(0, int(request["at"]))
        if "steps" in request:
            self.steps = None if not request["steps"] else min(max(1, int(request["steps"])), 64)

    def update(self, run: Any) -> Patch:
        self._note_rows(self.fresh(run.timeline.spans))
        if not self._ended:
            return Patch()
        if (latest := self._latest_step()) < 0:
            return Patch()
        first, last = self._choose_window(latest)
        grows = run.live and self.at is None and self._seconds > SLOW_STEP
        key = (first, last, self.at, len(run.timeline.spans) if grows else 0, latest if self.at is not None else 0)
        if key == self._shown:
            return Patch()
        same = key[:4] == self._shown[:4]
        self._shown = key
        facts: dict[str, Any] = {"latest": latest, "follow": self.at is None, "live": bool(run.live)}
        return Patch(facts=facts) if same else self._draw_window(run, first, last, grows, facts)

    def _draw_window(self, run: Any, first: int, last: int, grows: bool, facts: dict[str, Any]) -> Patch:
        tail = 64 * ranks_of(run) if self.at is None else None
        rows, begin = _find_rows(run.timeline.spans.rows(), first, last + grows, tail)
        steps = rows[rows.equal("lane", "step") & (rows.step >= first) & (rows.step <= last)]
        if not len(steps):
            return Patch(facts=facts)
        low, high = float(steps.t0.min()), float(steps.t1.max())
        if grows:  # room for the present step
            high += 1.02 * self._seconds
        inside = (rows.t1 >= low) & (rows.asked <= high)
        arrived = last_arrivals(run.timeline, rows)
        inside &= rows.rank < self.ranks(run)
        rows, index = rows[inside], begin + np.flatnonzero(inside)
        found = boxes_of(rows, index, arrived[inside], MAX_BOXES, _is_dense(run, rows))
        if not run.secret and (self.at is not None or not run.live or ranks_of(run) <= MAX_PATH_RANKS):
            _mark_path(found, run, first, last, self.ranks(run), int(index[0]))
        newest = float(rows.t1.max())
        high = max(high, newest) if grows else high
        facts |= {
            "first": first,
            "last": last,
            "names": [_short_names(n) for n in found.names],
            "newest": min(newest, high),
        }
        pad = 0.004 * (high - low)
        return Patch(replace=found.traces, layout={"xaxis.range": [low - pad, high + pad]}, facts=facts)

    def _note_rows(self, rows: Rows) -> None:
        for rank in np.unique(rows.rank):
            self._heard[int(rank)] = max(self._heard.get(int(rank), 0.0), float(rows.t1[rows.rank == rank].max()))
        ended = rows[rows.equal("lane", "step")]
        for rank in np.unique(ended.rank):
            mine = ended.rank == rank
            self._ended[int(rank)] = max(self._ended.get(int(rank), 0), int(ended.step[mine].max()))
        if len(ended):
            self._seconds = float((ended.t1 - ended.t0)[-1])

    def _latest_step(self) -> int:
        """Returns the last step that ended on every rank that still sends rows, or -1."""
        newest = max(self._heard.values())
        awake = [rank for rank, t in self._heard.items() if t > newest - MAX_ROW_DELAY - 3 * self._seconds]
        return min(self._ended.get(rank, -1) for rank in awake)

    def _choose_window(self, latest: int) -> tuple[int, int]:
        count = self.steps or int(np.clip(0.4 / max(self._seconds, 1e-3), 3, 6) if len(self._ended) <= 4 else 3)
        if self.at is None:
            return max(0, latest - count + 1), latest
        first = min(self.at, latest)
        return first, min(first + count - 1, latest)

    def table(self, run: Any) -> Grid:
        head = ("step", "rank", "lane", "name", "start (s)", "lasted (ms)", "bytes sent", "Mbit/s")
        if not self._shown:
            return Grid(head, [])
        first, last = self._shown[:2]
        rows, _ = _find_rows(run.timeline.spans.rows(), first, last, None)
        keep = (rows.step >= first) & (rows.step <= last) & ~rows.equal("lane", "ticket")
        rows = rows[keep][:400]
        seconds = rows.t1 - rows.t0
        rate = send_rates(rows, last_arrivals(run.timeline, rows))
        cells = zip(rows.step, rows.rank, rows.lane, rows.name, rows.t0, seconds, rows.nbytes, rate, strict=True)
        out = [
            (int(s), int(r), lane, name, f"{t:.4f}", f"{d * 1e3:.2f}", f"{b:,}" if b else "", _format_rate(m))
            for s, r, lane, name, t, d, b, m in cells
        ]
        note = f"Spans of steps {first} to {last} (at most 400); Mbit/s from the last rank's arrival"
        return Grid(head, sorted(out), note)


def _mark_path(found: Boxes, run: Any, first: int, last: int, ranks: int, row: int) -> None:
    """Draws work of all ranks in the row of the rank that continues it."""
    path = critical_path(run.timeline, first, last + 1)
    where = np.array([p.rank for p in path], np.int64)
    for i in range(len(path) - 1, -1, -1):
        if where[i] < 0:
            after = i + 1 < len(path) and path[i + 1].step == path[i].step
            where[i] = where[i + 1] if after else max(0, where[i - 1])
    shown = [i for i, rank in enumerate(where) if rank < ranks]
    add_path(found, [path[i] for i in shown], where[shown], row)


def _find_rows(rows: Rows, first: int, last: int, tail: int | None) -> tuple[Rows, int]:
    """Returns the rows of steps [first, last] and the first row's index. tail: search from the end"""
    n, begin = len(rows), 0
    if tail is not None:
        size = tail * (last - first + 6)
        begin = max(0, n - size)
        while begin and rows.step[begin : begin + tail].min() >= first:
            begin = max(0, begin - size)
    hit = np.flatnonzero((rows.step[begin:] >= first) & (rows.step[begin:] <= last)) + begin
    if not len(hit):
        return rows[:0], 0
    return rows[int(hit[0]) : int(hit[-1]) + 1], int(hit[0])


def _is_dense(run: Any, rows: Rows) -> np.ndarray:
    out = np.zeros(len(rows), bool)
    for s in list_stretches(run):
        if not s.compressor:
            out |= (rows.step >= s.first) & (rows.step < s.stop)
    return out


def _format_rate(mbit: float) -> str:
    """Formats a rate with 3 digits, like the page. "" if nothing was sent."""
    return f"{float(f'{mbit:.3g}'):g}" if mbit == mbit else ""


def _short_names(name: str) -> dict[str, Any]:
    bucket = re.search(r"bucket (\d+)", name)
    brief = {"forward": ["fwd", "F"], "backward": ["bwd", "B"], "backward weights": ["W"], "update": ["upd", "U"]}
    phase, _, micro = name.rpartition(" ")
    if bucket:
        short = [bucket[0], f"b{bucket[1]}", bucket[1]]
    elif micro.replace(".", "").isdigit() and phase in brief:
        short = [name, f"{brief[phase][-1]}{micro}", micro]
    else:
        short = [name, *brief.get(name, [])]
    return {"name": name, "short": short}


def _make_layout(ranks: int) -> go.Layout:
    pitch = float(np.clip(440 / ranks, 26, 66))
    where: list[float] = []
    names: list[str] = []
    for rank in range(ranks):
        where += [rank - 0.26, rank + 0.16] if pitch > 40 else [rank]
        names += [f"<b>rank {rank}</b>  compute", "network"] if pitch > 40 else [f"rank {rank}"]
    return theme.make_layout(
        int(ranks * pitch + 72),
        xaxis=theme.make_axis("time since the run began (s)", nticks=9, tickformat=".6~f", showgrid=False),
        yaxis=theme.make_axis(
            "",
            range=[ranks - 0.45, -0.55],
            tickvals=where,
            ticktext=names,
            ticklabelstandoff=6,
            showgrid=False,
            showline=False,
            ticks="",
        ),
        margin={"l": 132, "r": 10, "t": 24, "b": 46},
        hovermode=False,
        dragmode=False,
    )
