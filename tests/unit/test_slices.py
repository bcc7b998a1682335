"""Compares arithmetic of strided runs with the same arithmetic by element, on random cases."""

from __future__ import annotations

import random
import time

import pytest
import torch

from tests.spread import elements, local
from workbench.host.placement.strided_slices import StridedSlice, cut_slices, refine_slices


def drawn(rng: random.Random, size: int) -> StridedSlice:
    """Returns a random slice of a tensor of `size` elements, with any stride; its runs may wrap around a row."""
    length = rng.randint(1, max(1, size // 3))
    stride = length + rng.choice([0, 1, 2, rng.randint(0, size)])
    start = rng.randint(0, size - length)
    return StridedSlice(start, length, stride, rng.randint(1, 1 + (size - length - start) // stride))


def apart(rng: random.Random, size: int) -> list[StridedSlice]:
    """Returns several slices without common elements."""
    found: list[StridedSlice] = []
    for _ in range(rng.randint(1, 4)):
        s = drawn(rng, size)
        if not set(elements(s)) & {e for one in found for e in elements(one)}:
            found.append(s)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_refined_parts_are_disjoint_and_keep_the_sets_of_each_element(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        size = rng.choice([5, 12, 30, 60])
        sets = [apart(rng, size) for _ in range(rng.randint(1, 4))]
        parts = refine_slices(sets)
        seen = [e for part, _ in parts for e in elements(part)]
        assert len(seen) == len(set(seen))
        assert set(seen) == {e for each in sets for e in local(each)}
        for part, members in parts:
            assert part == part.to_normal_form()
            for i, each in enumerate(sets):
                inside = [set(elements(part)) <= set(elements(s)) for s in each]
                assert sum(inside) == members >> i & 1, "it lies in one slice of every set that holds it"
                assert members >> i & 1 or not set(elements(part)) & set(local(each))


@pytest.mark.parametrize("seed", range(4))
def test_a_part_is_located_within_its_slice(seed: int) -> None:
    rng = random.Random(100 + seed)
    for _ in range(300):
        size = rng.choice([12, 30, 60])
        whole, other = drawn(rng, size).to_normal_form(), apart(rng, size)
        for part, members in refine_slices([[whole], other]):
            if members & 1:
                head, tail = (
                    part.cut_at(rng.randint(1, part.element_count - 1)) if part.element_count > 1 else ([part], [])
                )
                for piece in head + tail:
                    own = [elements(whole)[i] for i in elements(piece.locate_inside(whole))]
                    assert own == elements(piece)
                    assert all(whole.has_element(e) for e in own)


def test_a_slice_holds_exactly_its_elements_and_is_cut_in_order() -> None:
    rng = random.Random(7)
    for _ in range(500):
        s = drawn(rng, 40)
        assert [e for e in range(-3, 45) if s.has_element(e)] == elements(s)
        assert (
            elements(s.to_normal_form()) == elements(s)
            and s.element_count == len(elements(s))
            and s.stop_element == elements(s)[-1] + 1
        )
        for n in range(1, s.element_count):
            head, tail = s.cut_at(n)
            assert local(head) == elements(s)[:n] and local(tail) == elements(s)[n:]
            assert len(head) <= 2 and len(tail) <= 2


def test_a_line_is_dealt_in_order_with_cuts_at_the_nearest_borders() -> None:
    rng = random.Random(8)
    for _ in range(300):
        line = [(drawn(rng, 30), rng.choice([1, 2, 4, 8]), name) for name in "abcde"[: rng.randint(1, 5)]]
        widths = {name: width for _, width, name in line}
        total = sum(s.element_count * width for s, width, _ in line)
        ends = [*sorted(rng.randint(0, total) for _ in range(rng.randint(0, 4))), total]
        hands = cut_slices(line, ends)
        dealt = [(name, e) for hand in hands for s, name in hand for e in elements(s)]
        assert dealt == [(name, e) for s, _, name in line for e in elements(s)]
        at = 0
        for hand, end in zip(hands, ends, strict=True):
            at += sum(s.element_count * widths[name] for s, name in hand)
            assert abs(at - end) <= max(widths.values()) / 2


def test_the_columns_of_a_large_matrix_are_one_slice_each() -> None:
    n = 4096
    columns = [[StridedSlice(k * n // 8, n // 8, n, n)] for k in range(8)]
    assert refine_slices(columns) == [(each[0], 1 << k) for k, each in enumerate(columns)]
    heads = [
        [StridedSlice(k * n * n // 4, n * n // 4, n * n, 3)] for k in range(4)
    ]  # of a fused qkv (3, heads, d * in)
    assert len(refine_slices([*heads, *([StridedSlice(k * n // 4, n // 4, n, 3 * n)] for k in range(4))])) == 3 * 16


def test_cutting_a_large_matrix_takes_well_under_a_millisecond() -> None:
    n, quickest = 4096, 1.0
    sets = [[StridedSlice(0, n * n)], *([StridedSlice(k * n // 4, n // 4, n, n)] for k in range(4))]
    for _ in range(50):  # processor time, the least of many: a busy machine does not count
        began = time.process_time()
        refine_slices(sets)
        quickest = min(quickest, time.process_time() - began)
    assert quickest < 0.5e-3


def test_a_slice_equals_torchs_columns() -> None:
    matrix = torch.arange(24).view(4, 6)
    s = StridedSlice(2, 3, 6, 4)
    assert matrix.flatten()[elements(s)].equal(matrix[:, 2:5].flatten())
