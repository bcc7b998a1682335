"""Tests the checksum of state: additive over slices, ranks and buckets, and sensitive to changes."""

from __future__ import annotations

import pytest
import torch

from tests.spread import RANKS, local, reference, walk
from workbench.host.placement.checksum import SUM_MASK, compute_checksum
from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice, refine_slices


def once(placement: Placement, rank: int) -> dict[str, tuple[StridedSlice, ...]]:
    """Returns the slices of a rank that no lower rank holds."""
    found = {}
    for name in placement.slices_of_rank(rank):
        sets = [placement.slices_of_rank(r).get(name, ()) for r in range(rank + 1)]
        found[name] = tuple(piece for piece, members in refine_slices(sets) if members == 1 << rank)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_checksums_of_parts_add_up_for_any_placement(seed: int) -> None:
    true, shared = reference(seed), 0
    whole = compute_checksum(true)
    for placement in (step.to for step in walk(seed, 30)):
        counted = [once(placement, rank) for rank in range(RANKS)]
        parts = [compute_checksum({n: true[n][local(slices)] for n, slices in held.items()}, held) for held in counted]
        assert sum(parts) & SUM_MASK == whole
        shared += sum(placement.count_elements(r) for r in placement.holding_ranks) > sum(placement.sizes.values())
    assert shared > 5, "some placements have replicas, which count once"


def test_shapes_strides_and_the_order_of_names_do_not_matter() -> None:
    x, y = torch.randn(300, 257), torch.randn(5)
    one = compute_checksum({"x": x, "y": y})
    assert (
        one == compute_checksum({"y": y, "x": x.reshape(-1)}) == compute_checksum({"x": x.t().contiguous().t(), "y": y})
    )
    halves = {"x": x.reshape(-1)[70_000:]}, {"x": x.reshape(-1)[:70_000]}
    held = {"x": (StridedSlice(70_000, x.numel() - 70_000),)}, {"x": (StridedSlice(0, 70_000),)}
    assert sum(map(compute_checksum, halves, held)) + compute_checksum({"y": y}) & SUM_MASK == one


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8,
                                   torch.complex128, torch.float8_e4m3fn])  # fmt: skip
def test_a_bit_a_place_or_a_name_changes_the_checksum(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (100 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    x = raw.view(dtype)
    one = compute_checksum({"x": x})
    assert one == compute_checksum({"x": x.clone()}) and 0 <= one <= SUM_MASK
    others = [
        compute_checksum({"z": x}),
        compute_checksum({"x": x.flip(0) if dtype.itemsize > 1 else raw.flip(0).view(dtype)}),
    ]
    for at in (0, 37, raw.numel() - 1):
        for bit in (0, 7):
            flipped = raw.clone()
            flipped[at] ^= 1 << bit
            others.append(compute_checksum({"x": flipped.view(dtype)}))
    swapped = raw.view(100, -1).clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    others.append(compute_checksum({"x": swapped.reshape(-1).view(dtype)}))
    assert one not in others and len(set(others)) == len(others)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_two_signs_do_not_cancel(dtype: torch.dtype) -> None:
    """A sign is the highest bit. In a sum of integers two highest bits cancel, whatever factor they have."""
    x = torch.ones(64, dtype=dtype)
    other = x.clone()
    other[[5, 40]] = -1
    zeros = torch.zeros(2, dtype=dtype)
    assert compute_checksum({"x": x}) != compute_checksum({"x": other})
    assert compute_checksum({"x": zeros}) != compute_checksum({"x": -zeros}), "minus zero is another value"


def test_tensors_without_values_have_checksum_zero() -> None:
    assert compute_checksum({"x": torch.empty(3, device="meta")}) == 0
    assert compute_checksum({"x": torch.empty(0)}) == compute_checksum({}) == 0
