"""How late each rank comes to where all meet, step by step.

A wait makes clocks equal again: who was late to a step's first meeting is not late to its second, and behind a slow
wire nobody is. So what counts is a rank's own time from one step's last meeting to the next one's: all that it did not
stand still for, what it packed and unpacked while its step stood still included. A rank is late by how much more of
that it took than the median of the others. Clocks of different machines need not agree for it.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, against_others, lined_up
from workbench.analysis.steps.window import OUTSIDE, Window, last_steps, since_change
from workbench.record.timeline import Timeline

REACH = (1, 8, 64, 512)  # steps back in which the meeting before is looked for, one after the other


class Lateness(NamedTuple):
    """Seconds by which each rank came later than the median of the others (negative: before).

    NaN where ranks did not meet in a step, or a rank did not come; of a periodic strategy a meeting has what has built
    up since the one before.
    """

    ranks: np.ndarray  # (p,)
    steps: np.ndarray  # (n,)
    seconds: np.ndarray  # (n, p)

    @property
    def met(self) -> np.ndarray:
        """(n,) mask: steps in which ranks met."""
        out: np.ndarray = ~np.isnan(self.seconds).all(axis=1)
        return out


def lateness(tl: Timeline, first: int = 0, stop: int | None = None) -> Lateness:
    """Of the steps in [first, stop) that have ended on every rank (None: of all from `first` on)."""
    begun, ended = last_steps(tl)
    first = max(first, begun)
    stop = max(first, ended if stop is None else min(stop, ended))
    for reach in REACH:
        w = Window(tl, max(begun, first - reach), stop)
        met, own = _own(w, begun)
        if w.first == begun or (len(met) and met[0] < first):
            break
    seconds = np.full((stop - first, len(w.ranks)), np.nan)
    if len(met) > 1:
        late = _against(np.diff(own, axis=0))
        seconds[met[1:][met[1:] >= first] - first] = late[met[1:] >= first]
    return Lateness(w.ranks, np.arange(first, stop), seconds)


def _own(w: Window, begun: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps in which ranks met, (m, p) each rank's own clock when it came to the last meeting of each).

    The first row is where the run began, if it began in this window: step `begun` - 1.
    """
    met, came = _last_meetings(w, lined_up(w))
    if w.first == begun:
        steps = w.lane("step")
        start = np.full(len(w.ranks), np.nan)
        first = steps[steps.step == begun]
        start[w.column(first.rank)] = first.t0
        met, came = np.concatenate([[begun - 1], met]), np.concatenate([start[None], came])
    own = came.copy()
    for i, rank in enumerate(w.ranks):
        here = ~np.isnan(came[:, i])
        packed, either = w.cover(rank, "codec"), w.cover(rank, "codec", "wait", *OUTSIDE)
        own[here, i] += packed.until(came[here, i]) - either.until(came[here, i])
    return met, own


def _last_meetings(w: Window, c: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """(steps, (m, p) when each rank came) of the last collective of each step to which all came who ended the step."""
    there = ~np.isnan(c.t0)
    needed = ~np.isnan(w.step_seconds)[c.step - w.first]
    whole = np.flatnonzero((there.sum(axis=1) > 1) & ~(needed & ~there).any(axis=1))
    steps, back = np.unique(c.step[whole][::-1], return_index=True)
    return steps.astype(np.int64), c.t0[whole[::-1][back]]


def _against(values: np.ndarray) -> np.ndarray:
    """As `against_others`, of those who were there."""
    if not np.isnan(values).any():
        return against_others(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nobody there is no median, and NaN says so
        others = [np.nanmedian(np.delete(values, r, axis=1), axis=1) for r in range(values.shape[1])]
    return values - np.stack(others, axis=1)


class Strips:
    """Lateness of a growing record as at most `MOST` strips of equally many steps, each step looked at once.

    A strip has the mean of its steps' meetings. A step in which ranks did not meet counts with the next one in which
    they do, so that rounds of a periodic strategy are as wide as they are long.
    """

    MOST = 120
    LAST = 20  # meetings that are kept one by one

    def __init__(self, ranks: int) -> None:
        self.first, self.next = -1, 0  # of the steps that were looked at
        self.size = 1  # steps in a strip
        self.last = -1  # step in which ranks met
        self.recent = np.full((0, ranks), np.nan)  # (at most LAST, p) of the newest meetings since the last change
        self.most, self.most_at = np.full(ranks, np.nan), np.zeros(ranks, np.int64)
        self._sum, self._count = np.zeros((0, ranks)), np.zeros((0, ranks))
        self._drawn = 0  # steps that belong to a meeting, or to none for good

    @property
    def seconds(self) -> np.ndarray:
        """(strips, p) the mean of each; NaN where ranks did not meet."""
        out = np.full(self._sum.shape, np.nan)
        return np.divide(self._sum, self._count, out=out, where=self._count > 0)

    @property
    def mean(self) -> np.ndarray:
        """(p,) of all meetings, each as often as it has steps; NaN without any."""
        count = self._count.sum(axis=0)
        return np.divide(self._sum.sum(axis=0), count, out=np.full(len(count), np.nan), where=count > 0)

    @property
    def steps(self) -> np.ndarray:
        """(strips,) the middle of each."""
        out: np.ndarray = self.first + self.size * np.arange(len(self._sum)) + (self.size - 1) / 2
        return out

    def add(self, tl: Timeline, held_back: int = 0) -> bool:
        """Takes in the steps that have ended since, but for the newest `held_back`; was there a meeting?"""
        begun, ended = last_steps(tl)
        if ended - held_back <= max(self.next, begun):
            return False
        found = lateness(tl, self.next, ended - held_back)
        if self.first < 0:
            self.first = self._drawn = int(found.steps[0])
        self.next = int(found.steps[-1]) + 1
        met = np.flatnonzero(found.met)
        if len(met):
            here = found.ranks < self._sum.shape[1]
            seconds = np.full((len(met), self._sum.shape[1]), np.nan)
            seconds[:, found.ranks[here]] = found.seconds[met][:, here]
            self._meetings(found.steps[met].astype(np.int64), seconds, since_change(tl, 0, self.next))
        return bool(len(met))

    def _meetings(self, steps: np.ndarray, seconds: np.ndarray, changed: int) -> None:
        """(n,) steps in which ranks met, (n, p) how late each came, and the last step from which a change acted."""
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
            self._halve()
        many = steps + 1 - begins  # steps that each meeting stands for
        own = np.repeat(np.arange(len(steps)), many)
        drawn = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many) + begins[own]
        strips = (drawn - self.first) // self.size
        self._grow(int(strips.max()) + 1)
        np.add.at(self._sum, strips, np.where(there, seconds, 0.0)[own])
        np.add.at(self._count, strips, there[own])
        self.last, self._drawn = int(steps[-1]), int(steps[-1]) + 1

    def _grow(self, strips: int) -> None:
        more = np.zeros((max(0, strips - len(self._sum)), self._sum.shape[1]))
        self._sum, self._count = np.concatenate([self._sum, more]), np.concatenate([self._count, more])

    def _halve(self) -> None:
        self._grow(len(self._sum) + len(self._sum) % 2)
        self._sum, self._count = (v.reshape(-1, 2, v.shape[1]).sum(axis=1) for v in (self._sum, self._count))
        self.size *= 2
