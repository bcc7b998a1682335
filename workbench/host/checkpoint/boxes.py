"""Converts slices of a tensor into boxes, as torch.distributed.checkpoint names pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from workbench.host.placement.strided_slices import StridedSlice

MAX_BOXES = 4096  # a part with more is a separate tensor


class Box(NamedTuple):
    """Offsets and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def convert_slices(shape: Sequence[int], slices: Iterable[StridedSlice]) -> list[Box] | None:
    """Returns boxes with the slices' elements in order; None for more than MAX_BOXES.

    >>> convert_slices((4, 6), [StridedSlice(2, 2, 6, 4)])
    [Box(offsets=(0, 2), sizes=(4, 2))]
    """
    found: list[Box] = []
    for s in slices:
        found += _convert_slice(tuple(shape), s)
        if len(found) > MAX_BOXES:
            return None
    return found


def _convert_slice(shape: tuple[int, ...], s: StridedSlice) -> list[Box]:
    if s.times == 1 or s.stride == s.length:
        return list(_list_run_boxes(shape, s.start, s.start + s.element_count))
    for k in range(1, len(shape)):
        row, column = divmod(s.start, s.stride)
        if prod(shape[k:]) == s.stride and column + s.length <= s.stride:
            inner = list(_list_run_boxes(shape[k:], column, column + s.length))
            if len(inner) == 1:
                outer = _list_run_boxes(shape[:k], row, row + s.times)
                return [Box(o.offsets + inner[0].offsets, o.sizes + inner[0].sizes) for o in outer]
    if s.times > MAX_BOXES:
        return [Box((), ())] * (MAX_BOXES + 1)
    starts = [s.start + n * s.stride for n in range(s.times)]
    return [box for start in starts for box in _list_run_boxes(shape, start, start + s.length)]


def _list_run_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = prod(shape[1:])
    (first, low), (last, high) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _list_row_boxes(shape, first, low, high)
        return
    if low:
        yield from _list_row_boxes(shape, first, low, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if high:
        yield from _list_row_boxes(shape, last, 0, high)


def _list_row_boxes(shape: tuple[int, ...], row: int, low: int, high: int) -> Iterator[Box]:
    for box in _list_run_boxes(shape[1:], low, high):
        yield Box((row, *box.offsets), (1, *box.sizes))
