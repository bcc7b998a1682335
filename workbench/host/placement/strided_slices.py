"""Strided runs of a flat tensor's elements, as numbers.

A column of a matrix, or one rank's heads of a fused qkv, is thousands of intervals but one StridedSlice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class StridedSlice(NamedTuple):
    """Elements start + k * stride + j of a flat tensor, for k < times and j < length, in that order; j runs first.

    stride: at least `length`; 0 if there is only one stretch

    >>> StridedSlice(2, 2, 6, 3).element_count  # columns 2 and 3 of a matrix of 3 rows and 6 columns
    6
    """

    start: int
    length: int
    stride: int = 0
    times: int = 1

    @property
    def element_count(self) -> int:
        return self.length * self.times

    @property
    def stop_element(self) -> int:
        return self.start + (self.times - 1) * self.stride + self.length

    def to_normal_form(self) -> StridedSlice:
        """Makes one stretch of contiguous elements."""
        if self.times == 1:
            return StridedSlice(self.start, self.length)
        return StridedSlice(self.start, self.element_count) if self.length == self.stride else self

    def has_element(self, element: int) -> bool:
        return self.start <= element < self.stop_element and (
            self.times == 1 or (element - self.start) % self.stride < self.length
        )

    def cut_at(self, n: int) -> tuple[list[StridedSlice], list[StridedSlice]]:
        """Returns the first n elements and the remaining ones, for 0 < n < element_count.

        >>> StridedSlice(2, 2, 6, 3).cut_at(3)
        ([StridedSlice(start=2, length=2, stride=0, times=1), StridedSlice(start=8, length=1, stride=0, times=1)],
         [StridedSlice(start=9, length=1, stride=0, times=1), StridedSlice(start=14, length=2, stride=0, times=1)])
        """
        rows, rest = divmod(n, self.length)
        broken = self.start + rows * self.stride  # the stretch with the cut
        after = rows + (rest > 0)
        head = [self._replace(times=rows), StridedSlice(broken, rest)]
        tail = [
            StridedSlice(broken + rest, self.length - rest if rest else 0),
            self._replace(start=self.start + after * self.stride, times=self.times - after),
        ]
        return [s.to_normal_form() for s in head if s.element_count], [
            s.to_normal_form() for s in tail if s.element_count
        ]

    def locate_inside(self, whole: StridedSlice) -> StridedSlice:
        """Returns the place of a part from `refine_slices` in the flat tensor of `whole`'s elements.

        >>> StridedSlice(9, 1, 6, 2).locate_inside(StridedSlice(2, 2, 6, 3))  # column 3 of rows 1 and 2
        StridedSlice(start=3, length=1, stride=2, times=2)
        """
        row, at = divmod(self.start - whole.start, whole.stride) if whole.times > 1 else (0, self.start - whole.start)
        start = row * whole.length + at
        if self.times == 1 or at + self.stop_element - self.start <= whole.length:
            return self._replace(start=start)
        return StridedSlice(start, self.length, self.stride // whole.stride * whole.length, self.times)


class _PeriodicBlock(NamedTuple):
    """Elements e of one set in [start, stop) with low <= e % period < high."""

    start: int
    stop: int
    low: int
    high: int
    member: int


def refine_slices(sets: Sequence[Iterable[StridedSlice]]) -> list[tuple[StridedSlice, int]]:
    """Cuts several sets of slices of one tensor by each other, into (part, the sets that hold it).

    Bit i of the second number says whether sets[i] holds the part. Parts are disjoint, each inside one slice of every
    set that holds it. Slices of the most frequent stride take one step each, other slices one step per stretch.

    >>> refine_slices([[StridedSlice(0, 12)], [StridedSlice(2, 1, 3, 4)]])  # all of a 4 x 3 matrix, and its last column
    [(StridedSlice(start=0, length=2, stride=3, times=4), 1), (StridedSlice(start=2, length=1, stride=3, times=4), 3)]
    """
    period = _find_period(s for each in sets for s in each)
    begin: dict[int, list[_PeriodicBlock]] = defaultdict(list)
    end: dict[int, list[_PeriodicBlock]] = defaultdict(list)
    for number, each in enumerate(sets):
        for block in (b for s in each for b in _list_blocks(s, period, 1 << number)):
            begin[block.start].append(block)
            end[block.stop].append(block)
    found: list[tuple[StridedSlice, int]] = []
    present: set[_PeriodicBlock] = set()
    for low, high in pairwise(sorted(begin.keys() | end.keys())):
        present.difference_update(end[low])
        present.update(begin[low])
        if present:
            found += _list_parts(low, high, period, present)
    return found


def _find_period(slices: Iterable[StridedSlice]) -> int:
    counts: Counter[int] = Counter()
    for s in slices:
        if s.times > 1:
            counts[s.stride] += s.times
    return max(counts, key=lambda stride: (counts[stride], stride), default=0)


def _list_blocks(s: StridedSlice, period: int, member: int) -> Iterator[_PeriodicBlock]:
    if s.times == 1 or s.stride != period:
        for k in range(s.times):
            yield _PeriodicBlock(s.start + k * s.stride, s.start + k * s.stride + s.length, 0, period, member)
        return
    row, low = divmod(s.start, period)
    begin, high = row * period, low + s.length
    yield _PeriodicBlock(begin, begin + s.times * period, low, min(high, period), member)
    if high > period:
        yield _PeriodicBlock(begin + period, begin + (s.times + 1) * period, 0, high - period, member)


def _list_parts(low: int, high: int, period: int, present: set[_PeriodicBlock]) -> Iterator[tuple[StridedSlice, int]]:
    if all(b.high - b.low == period for b in present):
        yield StridedSlice(low, high - low), _join_members(present)
        return
    first, last = -(-low // period) * period, high // period * period  # whole periods between
    stretches = [(low, first), (first, last), (last, high)] if first <= last else [(low, high)]
    for begin, end in stretches:
        rows = (end - begin) // period or 1
        row = begin // period * period
        for a, b in pairwise(_list_borders(begin - row, min(end - row, period), present)):
            if member := _join_members(x for x in present if x.low <= a and b <= x.high):
                yield StridedSlice(row + a, b - a, period, rows).to_normal_form(), member


def _list_borders(low: int, high: int, present: set[_PeriodicBlock]) -> list[int]:
    inner = {x for b in present for x in (b.low, b.high) if low < x < high}
    return sorted({low, high} | inner) if low < high else []


def _join_members(blocks: Iterable[_PeriodicBlock]) -> int:
    found = 0
    for block in blocks:
        found |= block.member
    return found


def cut_slices(line: Iterable[tuple[StridedSlice, int, T]], ends: Sequence[int]) -> list[list[tuple[StridedSlice, T]]]:
    """Lays slices end to end and cuts the line into pieces. The last piece takes the remainder.

    line: (slice, length of one element on the line, any value)
    ends: the end of each piece on the line; the cut is at the nearest border of two elements

    >>> cut_slices([(StridedSlice(0, 4), 1, "a"), (StridedSlice(0, 8), 1, "b")], [6, 12])
    [[(StridedSlice(start=0, length=4, stride=0, times=1), 'a'),
      (StridedSlice(start=0, length=2, stride=0, times=1), 'b')],
     [(StridedSlice(start=2, length=6, stride=0, times=1), 'b')]]
    """
    pieces: list[list[tuple[StridedSlice, T]]] = [[] for _ in ends]
    who = at = 0
    for whole, width, what in line:
        left = [whole]
        while left:
            one = left.pop()
            room = (2 * (ends[who] - at) + width) // (2 * width) if who < len(ends) - 1 else one.element_count
            if room >= one.element_count:
                pieces[who].append((one, what))
                at += one.element_count * width
                continue
            head, tail = one.cut_at(room) if room > 0 else ([], [one])
            pieces[who] += [(s, what) for s in head]
            at += max(room, 0) * width
            left += reversed(tail)
            who += 1
    return pieces
