"""How late each rank arrives at the meetings of all ranks, step by step.

A rank that is late to a step's first meeting is on time at the second. So lateness is a rank's own time between the
steps' last meetings, minus the other ranks' median. Own time excludes waits, except packing in them. Clocks need not
agree.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, against_others, lined_up
from workbench.analysis.steps.window import OUTSIDE, Window, last_steps, since_change
from workbench.record.timeline import Timeline

REACH = (1, 8, 64, 512)  # steps back for the previous meeting


class Lateness(NamedTuple):
    """Seconds by which each rank arrived after the other ranks' median (negative: before).

    NaN without a meeting, or for an absent rank. A periodic strategy's meeting has the sum since the last meeting.
    """

    ranks: np.ndarray  # (p,)
    steps: np.ndarray  # (n,)
    seconds: np.ndarray  # (n, p)

    @property
    def met(self) -> np.ndarray:
        """`(n,)` mask: steps with a meeting."""
        out: np.ndarray = ~np.isnan(self.seconds).all(axis=1)
        return out


def measure_lateness(tl: Timeline, first: int = 0, stop: int | None = None) -> Lateness:
    """Measures the steps of `[first, stop)` (None: all) that ended on every rank."""
    begun, ended = last_steps(tl)
    first = max(first, begun)
    stop = max(first, ended if stop is None else min(stop, ended))
    for reach in REACH:
        w = Window(tl, max(begun, first - reach), stop)
        met, own = _own_clocks(w, begun)
        if w.first == begun or (len(met) and met[0] < first):
            break
    seconds = np.full((stop - first, len(w.ranks)), np.nan)
    if len(met) > 1:
        late = _compare_known(np.diff(own, axis=0))
        seconds[met[1:][met[1:] >= first] - first] = late[met[1:] >= first]
    return Lateness(w.ranks, np.arange(first, stop), seconds)


def _own_clocks(w: Window, begun: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps with meetings, and `(m, p)` ranks' own clocks at each step's last meeting.

    If the run began here, the first row is its start as step `begun` - 1.
    """
    met, came = _last_meetings(w, lined_up(w))
    if w.first == begun:
        steps = w.lane("step")
        start = np.full(len(w.ranks), np.nan)
        first = steps[steps.step == begun]
        start[w.column_of(first.rank)] = first.t0
        met, came = np.concatenate([[begun - 1], met]), np.concatenate([start[None], came])
    own = came.copy()
    for i, rank in enumerate(w.ranks):
        here = ~np.isnan(came[:, i])
        packed, either = w.cover(rank, "codec"), w.cover(rank, "codec", "wait", *OUTSIDE)
        own[here, i] += packed.length_until(came[here, i]) - either.length_until(came[here, i])
    return met, own


def _last_meetings(w: Window, c: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, `(m, p)` arrivals) of each step's last common collective."""
    there = ~np.isnan(c.t0)
    needed = ~np.isnan(w.step_seconds)[c.step - w.first]
    whole = np.flatnonzero((there.sum(axis=1) > 1) & ~(needed & ~there).any(axis=1))
    steps, back = np.unique(c.step[whole][::-1], return_index=True)
    return steps.astype(np.int64), c.t0[whole[::-1][back]]


def _compare_known(values: np.ndarray) -> np.ndarray:
    """`against_others` without NaN."""
    if not np.isnan(values).any():
        return against_others(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN is right without other ranks
        others = [np.nanmedian(np.delete(values, r, axis=1), axis=1) for r in range(values.shape[1])]
    return values - np.stack(others, axis=1)


class LatenessStrips:
    """Lateness of a growing record as at most `MOST` equal strips of steps. Reads each step once.

    A strip has the mean of its meetings. A step without a meeting counts with the next, so that a periodic strategy's
    rounds have their true width.
    """

    MOST = 120
    LAST = 20  # meetings kept one by one

    def __init__(self, ranks: int) -> None:
        self.first, self.next = -1, 0  # first step read; next
        self.size = 1  # steps per strip
        self.last = -1  # last step with a meeting
        self.recent = np.full((0, ranks), np.nan)  # (at most LAST, p) newest since the last change
        self.most, self.most_at = np.full(ranks, np.nan), np.zeros(ranks, np.int64)
        self._sum, self._count = np.zeros((0, ranks)), np.zeros((0, ranks))
        self._drawn = 0  # first step of an open meeting

    @property
    def seconds(self) -> np.ndarray:
        """`(strips, p)` means; NaN without meetings."""
        out = np.full(self._sum.shape, np.nan)
        return np.divide(self._sum, self._count, out=out, where=self._count > 0)

    @property
    def mean(self) -> np.ndarray:
        """`(p,)` mean over meetings, weighted by steps. NaN without a meeting."""
        count = self._count.sum(axis=0)
        return np.divide(self._sum.sum(axis=0), count, out=np.full(len(count), np.nan), where=count > 0)

    @property
    def steps(self) -> np.ndarray:
        out: np.ndarray = self.first + self.size * np.arange(len(self._sum)) + (self.size - 1) / 2
        return out

    def add_steps(self, tl: Timeline, held_back: int = 0) -> bool:
        """Reads new steps, except the newest `held_back`. Returns whether ranks met."""
        begun, ended = last_steps(tl)
        if ended - held_back <= max(self.next, begun):
            return False
        found = measure_lateness(tl, self.next, ended - held_back)
        if self.first < 0:
            self.first = self._drawn = int(found.steps[0])
        self.next = int(found.steps[-1]) + 1
        met = np.flatnonzero(found.met)
        if len(met):
            here = found.ranks < self._sum.shape[1]
            seconds = np.full((len(met), self._sum.shape[1]), np.nan)
            seconds[:, found.ranks[here]] = found.seconds[met][:, here]
            self._add_meetings(found.steps[met].astype(np.int64), seconds, since_change(tl, 0, self.next))
        return bool(len(met))

    def _add_meetings(self, steps: np.ndarray, seconds: np.ndarray, changed: int) -> None:
        recent = seconds
        if self.last < changed <= steps[-1]:
            self.recent, recent = self.recent[:0], seconds[steps >= changed]
        self.recent = np.concatenate([self.recent, recent])[-self.LAST :]
        there = ~np.isnan(seconds)
        some = there.any(axis=0)
        at = np.where(there, seconds, -np.inf).argmax(axis=0)
        most = seconds[at, np.arange(len(at))]
        more = some & ~(most <= self.most)
        self.most[more], self.most_at[more] = most[more], steps[at[more]]
        begins = np.maximum(np.concatenate([[self._drawn], steps[:-1] + 1]), steps + 1 - REACH[-1])
        while (steps[-1] - self.first) // self.size >= self.MOST:
            self._halve_strips()
        many = steps + 1 - begins  # steps per meeting
        own = np.repeat(np.arange(len(steps)), many)
        drawn = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many) + begins[own]
        strips = (drawn - self.first) // self.size
        self._grow_strips(int(strips.max()) + 1)
        np.add.at(self._sum, strips, np.where(there, seconds, 0.0)[own])
        np.add.at(self._count, strips, there[own])
        self.last, self._drawn = int(steps[-1]), int(steps[-1]) + 1

    def _grow_strips(self, strips: int) -> None:
        more = np.zeros((max(0, strips - len(self._sum)), self._sum.shape[1]))
        self._sum, self._count = np.concatenate([self._sum, more]), np.concatenate([self._count, more])

    def _halve_strips(self) -> None:
        self._grow_strips(len(self._sum) + len(self._sum) % 2)
        self._sum, self._count = (v.reshape(-1, 2, v.shape[1]).sum(axis=1) for v in (self._sum, self._count))
        self.size *= 2
