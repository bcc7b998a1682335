"""Converts slices of a tensor into boxes of its shape, which torch.distributed.checkpoint uses to name pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from workbench.host.placement.slices import Slice

MOST = 4096  # boxes of one tensor on one rank; with more, its part is written as a separate tensor


class Box(NamedTuple):
    """Where a box begins along each dimension, and its size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], slices: Iterable[Slice]) -> list[Box] | None:
    """Returns boxes with the slices' elements in the same order; None if there are more than MOST.

    >>> boxes((4, 6), [Slice(2, 2, 6, 4)])
    [Box(offsets=(0, 2), sizes=(4, 2))]
    """
    found: list[Box] = []
    for s in slices:
        found += _strided(tuple(shape), s)
        if len(found) > MOST:
            return None
    return found


def _strided(shape: tuple[int, ...], s: Slice) -> list[Box]:
    if s.times == 1 or s.stride == s.length:
        return list(_run(shape, s.start, s.start + s.numel))
    for k in range(1, len(shape)):
        row, column = divmod(s.start, s.stride)
        if prod(shape[k:]) == s.stride and column + s.length <= s.stride:
            inner = list(_run(shape[k:], column, column + s.length))
            if len(inner) == 1:
                outer = _run(shape[:k], row, row + s.times)
                return [Box(o.offsets + inner[0].offsets, o.sizes + inner[0].sizes) for o in outer]
    if s.times > MOST:
        return [Box((), ())] * (MOST + 1)
    starts = [s.start + n * s.stride for n in range(s.times)]
    return [box for start in starts for box in _run(shape, start, start + s.length)]


def _run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes of a contiguous run of elements."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = prod(shape[1:])
    (first, low), (last, high) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _in_row(shape, first, low, high)
        return
    if low:
        yield from _in_row(shape, first, low, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if high:
        yield from _in_row(shape, last, 0, high)


def _in_row(shape: tuple[int, ...], row: int, low: int, high: int) -> Iterator[Box]:
    for box in _run(shape[1:], low, high):
        yield Box((row, *box.offsets), (1, *box.sizes))
