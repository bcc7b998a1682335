"""The idle time of pipeline stages: fill and drain, unequal stages or a slow rank."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.window import Window, last_steps, since_change
from workbench.analysis.steps.words import format_seconds
from workbench.record.timeline import Rows, Timeline

UNEQUAL_STAGE_FACTOR = 1.15  # times the mean, above which a stage is reported
SLOW_RANK_FACTOR = 1.25  # times its stage's usual, above which a rank is reported


class Bubble(NamedTuple):
    """The idle time of a pipeline over some steps.

    share:     mean idle share of a stage, between a replica's first pass and its last
    pieces:    of the model on each stage, v
    least:     share of fill and drain alone, for equal passes: (p-1) / (v m + p-1), or with backwards in 2 halves
               (p-1) / (3 v m + p-1); 0 if the pipeline never drains
    busy:      `(ranks,)` median seconds per step in passes, with inner waits if ranks share a stage
    in_flight: `(ranks,)` the most micro-batches between begin of forward and end of backward
    """

    stages: int
    micros: int
    pieces: int
    share: float
    least: float
    busy: np.ndarray
    in_flight: np.ndarray
    slices: int = 1  # ranks that share a stage
    flushes: bool = True  # each micro-batch's passes are in one step
    ranks: tuple[int, ...] = ()  # ids; empty: 0, 1, 2, ...

    @property
    def text(self) -> str:
        """The idle share and its causes."""
        p, m = self.stages, self.micros
        pieces = f" through {self.pieces} pieces each" if self.pieces > 1 else ""
        least = (
            f"filling and draining {p} stages with {m} micro-batch{'es' if m > 1 else ''}{pieces} makes "
            f"{self.least * 100:.0f} %" if self.flushes else f"{p} stages that never drain need no idle time"
        )  # fmt: skip
        said = [f"Stages are idle for {self.share * 100:.0f} % of their passes' time; {least}."]
        by_stage = self.busy.reshape(-1, p, self.slices).swapaxes(1, 2).reshape(-1, p)
        mean, longest = by_stage.mean(axis=0), int(np.argmax(by_stage.mean(axis=0)))
        if mean[longest] > UNEQUAL_STAGE_FACTOR * mean.mean():
            takes = f"{mean[longest] / mean.mean():.1f} times the mean: {format_seconds(mean[longest])} per step"
            said.append(f"Stage {longest} takes longest, {takes}.")
        usual = np.median(by_stage, axis=0)
        stage = np.arange(len(self.busy)) // self.slices % p
        rank = int(np.argmax(self.busy / np.maximum(usual[stage], 1e-9)))
        if len(by_stage) > 1 and self.busy[rank] > SLOW_RANK_FACTOR * usual[stage[rank]]:
            names = self.ranks or range(len(self.busy))
            others = ", ".join(str(names[r]) for r in np.flatnonzero(stage == stage[rank]) if r != rank)
            times = self.busy[rank] / usual[stage[rank]]
            said.append(f"Rank {names[rank]} takes {times:.1f} times what is usual for its stage (rank {others}).")
        flying = ", ".join(str(n) for n in self.in_flight[: p * self.slices : self.slices])
        what = "micro-batches" if self.pieces == 1 else f"passes through one of {self.pieces} pieces"
        said.append(f"At most {flying} {what} in flight, by stage.")
        return " ".join(said)


def spread_at(tl: Timeline, step: int) -> tuple[int, int]:
    """Returns a replica's stages and its slices per stage at `step`. `(1, 1)` if it is whole."""
    rows = tl.marks.rows()
    if not len(rows):
        return 1, 1
    told = rows[rows.equal("name", "partition") & (rows.step <= step)]
    said = json.loads(told.detail[-1]) if len(told) else {}
    return int(said.get("stages", 1)), int(said.get("slices", 1))


def measure_bubble(tl: Timeline, last: int = 20, before: int | None = None) -> Bubble | None:
    """Measures the last `last` steps since the last change, up to step `before`.

    None if replicas are whole, or before the first step's end.
    """
    first, stop = last_steps(tl, last, before)
    p, t = spread_at(tl, stop - 1)
    w = Window(tl, max(first, since_change(tl, 0, stop)), stop)
    if p == 1 or not w.complete.any() or len(w.ranks) % (p * t):
        return None
    rows = w.rows[w.rows.equal("lane", "compute") & (w.rows.phase("forward") | w.rows.phase("backward"))]
    rows = rows[np.isin(rows.step, w.steps[w.complete])]
    if not len(rows):
        return None
    rows = rows if t == 1 else _merge_passes(rows)
    seconds = rows.t1 - rows.t0
    place = (rows.step - w.first) * len(w.ranks) + w.column_of(rows.rank)
    size = len(w.steps) * len(w.ranks)
    busy = np.bincount(place, seconds, size).reshape(-1, len(w.ranks))[w.complete]
    began, ended = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(began, place, rows.t0)
    np.maximum.at(ended, place, rows.t1)
    flights = [_in_flight(rows[rows.rank == rank]) for rank in w.ranks]
    flushes = not any(ahead for _, ahead in flights)
    if not flushes:  # stages make a step at different times
        steps = w.lane("step")
        began[(steps.step - w.first) * len(w.ranks) + w.column_of(steps.rank)] = steps.t0
    spread = [each.reshape(-1, len(w.ranks) // (p * t), p * t)[w.complete] for each in (began, ended)]
    lasts = spread[1].max(axis=2) - spread[0].min(axis=2)
    if not flushes:
        lasts = (spread[1] - spread[0]).mean(axis=2)
    share = 1.0 - busy.reshape(len(busy), -1, p * t).mean(axis=2) / lasts
    passes = [str(name).split()[-1].partition(".") for name in np.unique(rows.name[rows.phase("forward")])]
    micros, v = len({micro for micro, _, _ in passes}), len({chunk for _, _, chunk in passes})
    flying = np.array([most for most, _ in flights])
    halves = 3 if rows.phase("backward weights").any() else 1  # a forward and both halves, all of the same length
    least = (p - 1) / (halves * v * micros + p - 1)
    if not flushes:  # pass numbers continue across batches
        one = rows[(rows.rank == rows.rank[0]) & (rows.step == rows.step[-1])]
        micros, least = len(np.unique(one.name[one.phase("backward")])), 0.0
    ranks = tuple(map(int, w.ranks))
    return Bubble(p, micros, v, float(np.median(share)), least, np.median(busy, axis=0), flying, t, flushes, ranks)


def _merge_passes(rows: Rows) -> Rows:
    """Merges each pass's rows. The ranks of a stage meet inside a pass, which splits its row."""
    keys = [rows.rank, rows.step, np.unique(rows.name, return_inverse=True)[1]]
    order = np.lexsort([rows.t0, *keys])
    rows = rows[order]
    first = np.flatnonzero(np.any([np.diff(key[order], prepend=-1) != 0 for key in keys], axis=0))
    return rows[first].replaced(t1=np.maximum.reduceat(rows.t1, first))


def _in_flight(rows: Rows) -> tuple[int, bool]:
    """Returns one rank's most passes in flight, and whether a backward is in a later step.

    Names repeat in a step of several batches. An interrupted backward has several rows. Without drains, a forward may
    precede these rows.
    """
    rows = rows[np.argsort(rows.t0, kind="stable")]
    open_: dict[str, tuple[int, float]] = {}  # by pass: step of its forward, end of its backward so far
    events: list[tuple[float, int]] = []
    forward, ahead = rows.phase("forward"), False
    for step, name, t0, t1, goes in zip(rows.step, rows.name, rows.t0, rows.t1, forward, strict=True):
        key = str(name).split()[-1]
        went, end = open_.get(key, (-1, np.nan))
        if not goes:
            ahead |= went != step
            if went < 0:
                events.append((-np.inf, 1))
            open_[key] = step, float(t1)
            continue
        if went >= 0:
            events.append((float(t0) if np.isnan(end) else end, -1))  # its backward may be missing
        events.append((float(t0), 1))
        open_[key] = step, np.nan
    events += [(end, -1) for _, end in open_.values() if not np.isnan(end)]
    return int(np.cumsum([way for _, way in sorted(events)]).max()) if events else 0, ahead
