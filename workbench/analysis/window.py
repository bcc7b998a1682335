"""Some consecutive steps of a timeline, cut out so that questions about them are sums over small arrays."""

from __future__ import annotations

import json
from functools import cached_property

import numpy as np

from workbench.record.timeline import Rows, Timeline

OUTSIDE = ("eval", "switch")  # lanes that lie outside of steps
MEASURING = "measuring"  # the lane of what is done only to see what compression does
MANY = 50_000  # rows that are looked through without a thought for time


class Window:
    """The spans of steps [first, stop) on all ranks. Matrices are (steps, ranks); a missing step is NaN there."""

    def __init__(self, tl: Timeline, first: int, stop: int) -> None:
        self.first, self.stop = first, max(stop, first)
        rows = tl.spans.rows()
        self.rows = _cut(rows, self.first, self.stop)
        self.ranks = np.union1d(ranks_of(rows), self.rows.rank).astype(np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.first, len(self.ranks)

    @property
    def steps(self) -> np.ndarray:
        return np.arange(self.first, self.stop)

    def lane(self, *lanes: str, name: str | None = None) -> Rows:
        """The spans of some lanes."""
        mask = np.zeros(len(self.rows), bool)
        for lane in lanes:
            mask |= self.rows.equal("lane", lane)
        if name is not None:
            mask &= self.rows.phase(name) if lanes == ("compute",) else self.rows.equal("name", name)
        return self.rows[mask]

    def column(self, ranks: np.ndarray) -> np.ndarray:
        """Each rank's column in a matrix."""
        return np.searchsorted(self.ranks, ranks)

    def total(self, rows: Rows, values: np.ndarray) -> np.ndarray:
        """`values` of `rows` added up per step and rank."""
        where = (rows.step.astype(np.int64) - self.first) * len(self.ranks) + self.column(rows.rank)
        n, p = self.shape
        return np.bincount(where, values, minlength=n * p)[: n * p].reshape(n, p)

    def seconds(self, *lanes: str, name: str | None = None) -> np.ndarray:
        """Seconds spent in some lanes, per step and rank; spans inside evaluations and hand-overs are left out.

        Nor does it count as waiting that a rank stood still while something was measured.
        """
        rows = self.lane(*lanes, name=name)
        rows = rows[~self.outside(rows)] if not set(lanes) & set(OUTSIDE) else rows
        out = self.total(rows, rows.t1 - rows.t0)
        return (out - self.stood).clip(min=0) if "wait" in lanes else out

    @cached_property
    def step_seconds(self) -> np.ndarray:
        """How long each step lasted on each rank; NaN where it has not ended (or its rows are not here yet).

        Without the time for which it stood still while something was measured.
        """
        rows = self.lane("step")
        out = self.total(rows, rows.t1 - rows.t0) - self.stood
        return np.where(self.total(rows, np.ones(len(rows))) > 0, out, np.nan)

    @cached_property
    def complete(self) -> np.ndarray:
        """A mask over steps: those that ended on every rank."""
        return ~np.isnan(self.step_seconds).any(axis=1) if len(self.ranks) else np.zeros(self.shape[0], bool)

    @cached_property
    def disturbed(self) -> np.ndarray:
        """A mask over steps: those at which any rank evaluated, handed over or measured."""
        return self._at(*OUTSIDE, MEASURING)

    @cached_property
    def measured(self) -> np.ndarray:
        """A mask over steps: those in which any rank measured."""
        return self._at(MEASURING)

    @cached_property
    def usual(self) -> np.ndarray:
        """A mask over steps: those that a mean is taken over, which ended on every rank and in which none measured.

        Where ranks meet every few steps a meeting belongs to its whole round, and stays for that. All that ended stay
        where none would be left.
        """
        met = self._at("comm") & self.complete
        left = self.complete & ~self.measured
        return left if left.any() and met.sum() >= self.complete.sum() - 1 else self.complete

    @cached_property
    def stood(self) -> np.ndarray:
        """(steps, ranks) seconds for which a step stood still while something was measured."""
        out, waits = np.zeros(self.shape), self.lane("wait")
        waits = waits[~self.outside(waits)]  # an evaluation of what lies in shards gathers it, and belongs to no step
        for rank in np.unique(self.lane(MEASURING).rank):
            mine = waits[waits.rank == rank]
            measuring = self.cover(rank, MEASURING).between(mine.t0, mine.t1)
            np.add.at(out, (mine.step - self.first, self.column(rank)), measuring)
        return out

    def _at(self, *lanes: str) -> np.ndarray:
        """A mask over steps: those with a span in some lanes on any rank."""
        out = np.zeros(self.shape[0], bool)
        out[self.lane(*lanes).step - self.first] = True
        return out

    def outside(self, rows: Rows) -> np.ndarray:
        """A mask over `rows`: those that lie within an evaluation or a hand-over of their rank."""
        breaks, out = self.lane(*OUTSIDE), np.zeros(len(rows), bool)
        for rank in np.unique(breaks.rank):
            mine, cut = rows.rank == rank, breaks.rank == rank
            within = Cover(breaks.t0[cut], breaks.t1[cut])
            length = rows.t1[mine] - rows.t0[mine]
            out[mine] = within.between(rows.t0[mine], rows.t1[mine]) > 0.5 * length
        return out

    def cover(self, rank: int, *lanes: str) -> Cover:
        """The union of one rank's spans in some lanes."""
        rows = self.lane(*lanes)
        mine = rows.rank == rank
        return Cover(rows.t0[mine], rows.t1[mine])


class Cover:
    """A union of intervals that answers: how much of it lies between two times?

    >>> cover = Cover(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0]))
    >>> cover.length, float(cover.between(2.0, 5.5))
    (4.0, 1.5)
    """

    def __init__(self, begin: np.ndarray, end: np.ndarray) -> None:
        order = np.argsort(begin, kind="stable")
        begin, end = np.asarray(begin, float)[order], np.asarray(end, float)[order]
        reach = np.maximum.accumulate(end) if len(end) else end
        fresh = np.ones(len(begin), bool)
        fresh[1:] = begin[1:] > reach[:-1]
        first = np.flatnonzero(fresh)
        self.begin = begin[first]
        self.end = np.maximum.reduceat(end, first) if len(first) else end
        self._at = np.stack([self.begin, self.end], axis=1).ravel()
        steps = np.stack([np.zeros(len(first)), self.end - self.begin], axis=1).ravel()
        self._sum = np.cumsum(steps)

    @property
    def length(self) -> float:
        return float(self._sum[-1]) if len(self._sum) else 0.0

    def until(self, t: np.ndarray) -> np.ndarray:
        """How much of the union lies before `t`."""
        out: np.ndarray = np.interp(t, self._at, self._sum) if len(self._at) else np.zeros(np.shape(t))
        return out

    def between(self, t0: np.ndarray, t1: np.ndarray) -> np.ndarray:
        out: np.ndarray = self.until(t1) - self.until(t0)
        return out


def ranks_of(rows: Rows) -> np.ndarray:
    """The ranks that wrote any of these rows, in order; of very many rows, of the first and last of them."""
    if len(rows) > 2 * MANY:
        return np.union1d(ranks_of(rows[:MANY]), ranks_of(rows[-MANY:]))
    return np.flatnonzero(np.bincount(rows.rank, minlength=1)) if len(rows) else np.empty(0, np.int64)


def stands_for(tl: Timeline) -> int:
    """For how many ranks each on the record stands, itself included: see `simulate(alike=True)`."""
    marks = tl.marks.rows()
    told = marks.detail[marks.equal("name", "start")][:1] if len(marks) else []
    return max(1, int(json.loads(told[0])["stands_for"])) if len(told) and '"stands_for"' in told[0] else 1


def last_steps(tl: Timeline, last: int | None = None, before: int | None = None) -> tuple[int, int]:
    """[first, stop) of the last `last` steps that have ended on every rank known so far (None: of all).

    before: of those before this step
    """
    rows = tl.spans.rows()
    ranks = ranks_of(rows)
    if not len(ranks):
        return 0, 0
    furthest = _furthest(rows[-MANY:], ranks)
    if (furthest < 0).any():
        furthest = _furthest(rows, ranks)
    first, stop = int(rows.step[:MANY].min()), int(furthest.min()) + 1
    stop = stop if before is None else min(stop, before)
    return (first if last is None else max(first, stop - last)), max(stop, first)


def _furthest(rows: Rows, ranks: np.ndarray) -> np.ndarray:
    """The last step that ended on each rank; -1 for none."""
    ended = np.flatnonzero(rows.equal("lane", "step"))
    out = np.full(len(ranks), -1)
    np.maximum.at(out, np.searchsorted(ranks, rows.rank[ended]), rows.step[ended])
    return out


def change_steps(tl: Timeline) -> np.ndarray:
    """The steps from which changes acted, in order."""
    rows = tl.marks.rows()
    return np.unique(rows.step[rows.equal("name", "change")]) if len(rows) else np.empty(0, np.int64)


def since_change(tl: Timeline, first: int, stop: int) -> int:
    """`first`, or the last step before `stop` from which a change acted, if that is later."""
    earlier = [int(s) for s in change_steps(tl) if s < stop]
    return max([first, *earlier[-1:]])


def _cut(rows: Rows, first: int, stop: int) -> Rows:
    hit = np.flatnonzero((rows.step >= first) & (rows.step < stop))
    if not len(hit):
        return rows[:0]
    rows = rows[int(hit[0]) : int(hit[-1]) + 1]
    return rows[(rows.step >= first) & (rows.step < stop)]
