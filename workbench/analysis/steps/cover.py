"""Unions of intervals; places of each rank in a column."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Cover:
    """A union of intervals, to measure parts of it.

    >>> cover = Cover(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0]))
    >>> cover.total_length, float(cover.length_between(2.0, 5.5))
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
    def total_length(self) -> float:
        return float(self._sum[-1]) if len(self._sum) else 0.0

    def length_until(self, t: np.ndarray) -> np.ndarray:
        """The union's length before `t`."""
        out: np.ndarray = np.interp(t, self._at, self._sum) if len(self._at) else np.zeros(np.shape(t))
        return out

    def length_between(self, t0: np.ndarray, t1: np.ndarray) -> np.ndarray:
        out: np.ndarray = self.length_until(t1) - self.length_until(t0)
        return out


NOTHING = Cover(np.empty(0), np.empty(0))


def by_rank(ranks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each rank of a column and its places, in order. Faster than a mask per rank.

    >>> [(rank, at.tolist()) for rank, at in by_rank(np.array([3, 0, 3]))]
    [(0, [1]), (3, [0, 2])]
    """
    order = np.argsort(ranks, kind="stable")
    cuts = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    for begin, at in zip(cuts, np.split(order, cuts[1:]), strict=True) if len(order) else ():
        yield int(ranks[order[begin]]), at
