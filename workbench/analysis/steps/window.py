"""Cuts consecutive steps out of a timeline, for analyses of small arrays."""

from __future__ import annotations

import json
from functools import cached_property
from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.cover import NOTHING, Cover, by_rank
from workbench.record.timeline import Rows, Timeline

OUTSIDE = ("eval", "switch")  # lanes outside of steps
MEASURING = "measuring"  # the lane that measures compression
MAX_SEARCHED_ROWS = 50_000  # rows that are quick to search


class Generation(NamedTuple):
    """The ranks that train from this step and time on, in the order of places."""

    step: int
    t: float
    members: tuple[int, ...]


class Window:
    """The spans of steps `[first, stop)` on the ranks of that time, as matrices `(steps, ranks)`.

    Missing steps are NaN. If a step was repeated after a loss, only the second time counts.
    """

    def __init__(self, tl: Timeline, first: int, stop: int) -> None:
        self.first, self.stop = first, max(stop, first)
        rows = tl.spans.rows()
        self.rows = _cut_rows(rows, self.first, self.stop)
        self.ranks = np.union1d(ranks_of(rows), self.rows.rank).astype(np.int64)
        self._lanes: dict[tuple[str | None, ...], Rows] = {}
        self._covers: dict[tuple[str, ...], dict[int, Cover]] = {}
        if since := list_generations(tl):
            self._of_those_there(since)

    def _of_those_there(self, since: list[Generation]) -> None:
        """Drops ranks lost before or joined later, and rows of repeated steps."""
        rows = self.rows
        counts = np.ones(len(rows), bool)
        for generation in since:
            counts &= (rows.step < generation.step) | (rows.t0 >= generation.t)
        self.rows = rows[counts]
        if (here := ranks_during(since, self.first, self.stop)) is not None:
            self.ranks = np.intersect1d(self.ranks, np.array(here, np.int64))
            self.rows = self.rows[np.isin(self.rows.rank, self.ranks)]

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.first, len(self.ranks)

    @property
    def steps(self) -> np.ndarray:
        return np.arange(self.first, self.stop)

    def lane(self, *lanes: str, name: str | None = None) -> Rows:
        if (name, *lanes) not in self._lanes:
            self._lanes[name, *lanes] = self._read_lane(lanes, name)
        return self._lanes[name, *lanes]

    def _read_lane(self, lanes: tuple[str, ...], name: str | None) -> Rows:
        mask = np.zeros(len(self.rows), bool)
        for lane in lanes:
            mask |= self.rows.equal("lane", lane)
        if name is not None:
            mask &= self.rows.phase(name) if lanes == ("compute",) else self.rows.equal("name", name)
        return self.rows[mask]

    def column_of(self, ranks: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.ranks, ranks)

    def sum_rows(self, rows: Rows, values: np.ndarray) -> np.ndarray:
        """Sums `values` of `rows` by step and rank."""
        where = (rows.step.astype(np.int64) - self.first) * len(self.ranks) + self.column_of(rows.rank)
        n, p = self.shape
        return np.bincount(where, values, minlength=n * p)[: n * p].reshape(n, p)

    def seconds(self, *lanes: str, name: str | None = None) -> np.ndarray:
        """Returns seconds in lanes per step and rank, without evaluations and hand-overs.

        Stalls during measurements are no waiting.
        """
        rows = self.lane(*lanes, name=name)
        rows = rows[~self.is_outside(rows)] if not set(lanes) & set(OUTSIDE) else rows
        out = self.sum_rows(rows, rows.t1 - rows.t0)
        return (out - self.stood).clip(min=0) if "wait" in lanes else out

    @cached_property
    def step_seconds(self) -> np.ndarray:
        """Returns each step's seconds on each rank, without stalls in measurements. NaN if unfinished or without
        rows.
        """
        rows = self.lane("step")
        out = self.sum_rows(rows, rows.t1 - rows.t0) - self.stood
        return np.where(self.sum_rows(rows, np.ones(len(rows))) > 0, out, np.nan)

    @cached_property
    def complete(self) -> np.ndarray:
        """`(n,)` mask: steps that ended on every rank."""
        return ~np.isnan(self.step_seconds).any(axis=1) if len(self.ranks) else np.zeros(self.shape[0], bool)

    @cached_property
    def disturbed(self) -> np.ndarray:
        """`(n,)` mask: any rank evaluated, handed over or measured."""
        return self._has_lane(*OUTSIDE, MEASURING)

    @cached_property
    def measured(self) -> np.ndarray:
        """`(n,)` mask: any rank measured."""
        return self._has_lane(MEASURING)

    @cached_property
    def usual(self) -> np.ndarray:
        """`(n,)` mask: steps for means, which ended on every rank without measurements.

        Includes measurements if no other step is left. Includes them with a periodic strategy, because its meetings
        belong to whole rounds.
        """
        met = self._has_lane("comm") & self.complete
        left = self.complete & ~self.measured
        return left if left.any() and met.sum() >= self.complete.sum() - 1 else self.complete

    @cached_property
    def stood(self) -> np.ndarray:
        """`(steps, ranks)` seconds of stalls in measurements."""
        out, waits = np.zeros(self.shape), self.lane("wait")
        waits = waits[~self.is_outside(waits)]  # a sharded model is gathered for evaluation, outside of steps
        for rank in np.unique(self.lane(MEASURING).rank):
            mine = waits[waits.rank == rank]
            measuring = self.cover(rank, MEASURING).length_between(mine.t0, mine.t1)
            np.add.at(out, (mine.step - self.first, self.column_of(rank)), measuring)
        return out

    def _has_lane(self, *lanes: str) -> np.ndarray:
        out = np.zeros(self.shape[0], bool)
        out[self.lane(*lanes).step - self.first] = True
        return out

    def is_outside(self, rows: Rows) -> np.ndarray:
        """A mask over `rows` within their rank's evaluations and hand-overs."""
        breaks, out = self.lane(*OUTSIDE), np.zeros(len(rows), bool)
        if not len(breaks) or not len(rows):
            return out
        for rank, mine in by_rank(rows.rank):
            if within := self._cover_ranks(*OUTSIDE).get(rank):
                length = rows.t1[mine] - rows.t0[mine]
                out[mine] = within.length_between(rows.t0[mine], rows.t1[mine]) > 0.5 * length
        return out

    def cover(self, rank: int, *lanes: str) -> Cover:
        """Returns the union of one rank's spans in some lanes."""
        return self._cover_ranks(*lanes).get(int(rank), NOTHING)

    def _cover_ranks(self, *lanes: str) -> dict[int, Cover]:
        if lanes not in self._covers:
            rows = self.lane(*lanes)
            self._covers[lanes] = {rank: Cover(rows.t0[mine], rows.t1[mine]) for rank, mine in by_rank(rows.rank)}
        return self._covers[lanes]


def ranks_of(rows: Rows) -> np.ndarray:
    """Returns these rows' ranks, in order. Skips the middle of very many rows."""
    if len(rows) > 2 * MAX_SEARCHED_ROWS:
        return np.union1d(ranks_of(rows[:MAX_SEARCHED_ROWS]), ranks_of(rows[-MAX_SEARCHED_ROWS:]))
    return np.flatnonzero(np.bincount(rows.rank, minlength=1)) if len(rows) else np.empty(0, np.int64)


def stands_for(tl: Timeline) -> int:
    """Returns how many ranks a recorded one stands for: see `simulate(alike=True)`."""
    marks = tl.marks.rows()
    told = marks.detail[marks.equal("name", "start")][:1] if len(marks) else []
    return max(1, int(json.loads(told[0])["stands_for"])) if len(told) and '"stands_for"' in told[0] else 1


def last_steps(tl: Timeline, last: int | None = None, before: int | None = None) -> tuple[int, int]:
    """Returns `[first, stop)` of the last `last` steps (None: all) ended by all present ranks.

    before: only earlier steps
    """
    rows = tl.spans.rows()
    ranks, since = ranks_of(rows), newest_generation(tl)
    if not len(ranks):
        return 0, 0
    first, begun = int(rows.step[:MAX_SEARCHED_ROWS].min()), -1
    if since is not None:
        ranks, rows, begun = np.array(since.members, np.int64), rows[rows.t0 >= since.t], since.step
        rows = rows[np.isin(rows.rank, ranks)]
    furthest = _last_ended(rows[-MAX_SEARCHED_ROWS:], ranks)
    if (furthest < 0).any():
        furthest = _last_ended(rows, ranks)
    stop = max(int(furthest.min()) + 1, begun)
    stop = stop if before is None else min(stop, before)
    if last is not None:
        first = max(first, stop - last, begun if stop > begun else 0)
    return first, max(stop, first)


def list_generations(tl: Timeline) -> list[Generation]:
    """Returns the generations since the ranks first changed."""
    rows = tl.marks.rows()
    rows = rows[rows.equal("name", "members")] if len(rows) else rows
    found = []
    for step, t, detail in zip(rows.step, rows.t, rows.detail, strict=True):
        members = json.loads(detail).get("members")  # absent if the run ends
        if isinstance(members, list) and members and all(type(rank) is int for rank in members):
            found.append(Generation(int(step), float(t), tuple(members)))
    return sorted(found, key=lambda one: one.t)


def ranks_during(since: list[Generation], first: int, stop: int) -> list[int] | None:
    """Returns the ranks in steps `[first, stop)`; None if `first` precedes all generations."""
    if not since or first < since[0].step:
        return None
    ends = [generation.step for generation in since[1:]] + [max(stop, since[-1].step + 1)]
    during = [g.members for g, end in zip(since, ends, strict=True) if g.step < stop and end > first]
    return sorted({rank for members in during for rank in members})


def newest_generation(tl: Timeline) -> Generation | None:
    """Returns the last generation, or None."""
    return found[-1] if (found := list_generations(tl)) else None


def _last_ended(rows: Rows, ranks: np.ndarray) -> np.ndarray:
    ended = np.flatnonzero(rows.equal("lane", "step"))
    out = np.full(len(ranks), -1)
    np.maximum.at(out, np.searchsorted(ranks, rows.rank[ended]), rows.step[ended])
    return out


def change_steps(tl: Timeline) -> np.ndarray:
    """Returns the first steps with changes, in order."""
    rows = tl.marks.rows()
    return np.unique(rows.step[rows.equal("name", "change")]) if len(rows) else np.empty(0, np.int64)


def since_change(tl: Timeline, first: int, stop: int) -> int:
    """Returns `first`, or a later last change of settings or ranks before `stop`."""
    earlier = [*(int(s) for s in change_steps(tl)), *(generation.step for generation in list_generations(tl))]
    return max([first, *(step for step in earlier if step < stop)])


def _cut_rows(rows: Rows, first: int, stop: int) -> Rows:
    hit = np.flatnonzero((rows.step >= first) & (rows.step < stop))
    if not len(hit):
        return rows[:0]
    rows = rows[int(hit[0]) : int(hit[-1]) + 1]
    return rows[(rows.step >= first) & (rows.step < stop)]
