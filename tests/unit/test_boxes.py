"""Tests slices as boxes against their elements."""

from __future__ import annotations

import random
from math import prod

import torch

from workbench.host.checkpoint.boxes import MAX_BOXES, convert_slices
from workbench.host.placement.strided_slices import StridedSlice


def elements(s: StridedSlice) -> list[int]:
    return [s.start + k * s.stride + j for k in range(s.times) for j in range(s.length)]


def test_boxes_hold_the_elements_of_their_slices_in_order() -> None:
    draw = random.Random(3)
    for _ in range(400):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
        numbers, n = torch.arange(prod(shape)).view(shape), prod(shape)
        length = draw.randint(1, n)
        stride = draw.randint(length, n)
        start = draw.randint(0, n - length)
        times = draw.randint(1, (n - length - start) // stride + 1)
        slices = [StridedSlice(start, length, stride if times > 1 else 0, times)]
        found = convert_slices(shape, slices)
        assert found is not None
        inside = [numbers[tuple(slice(o, o + k) for o, k in zip(*box, strict=True))] for box in found]
        assert torch.cat([x.reshape(-1) for x in inside]).tolist() == elements(slices[0])


def test_columns_of_a_matrix_are_one_box_and_thousands_of_boxes_are_refused() -> None:
    assert convert_slices((1000, 64), [StridedSlice(16, 16, 64, 1000)]) == [((0, 16), (1000, 16))]
    assert convert_slices((2 * MAX_BOXES, 3), [StridedSlice(0, 1, 2, 2 * MAX_BOXES)]) is None
