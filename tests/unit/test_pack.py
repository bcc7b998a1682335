"""Tests codes packed to their bits: a round trip in the fewest bytes without loss."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.compressors._pack import length, packed, unpacked

WIDTHS = range(1, 9)


def codes_of(width: int, rows: int, n: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 * n + width)
    return torch.randint(0, 2**width, (rows, n), generator=rng).to(torch.uint8)


def ones(x: torch.Tensor) -> list[int]:
    """Returns the number of set bits of each row."""
    return [sum(int(byte).bit_count() for byte in row) for row in x.tolist()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3])
def test_codes_round_trip_in_as_few_bytes_as_their_bits_need(width: int, rows: int) -> None:
    for n in [*range(26), 64, 101, 1000]:
        codes = codes_of(width, rows, n)
        data = packed(codes, width)
        assert data.shape == (rows, math.ceil(n * width / 8)) == (rows, length(n, width))
        assert data.dtype == torch.uint8
        assert torch.equal(unpacked(data, width, n), codes)
        assert ones(data) == ones(codes), "every bit once, and nothing besides"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_codes_do_not_touch_their_neighbours(width: int) -> None:
    for n in (8, 13):
        for at in range(n):
            codes = torch.zeros(1, n, dtype=torch.uint8)
            codes[0, at] = 2**width - 1
            assert torch.equal(unpacked(packed(codes, width), width, n), codes)


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_does_not_modify_its_input(width: int) -> None:
    codes = codes_of(width, 2, 40)
    kept, data = codes.clone(), packed(codes, width)
    again = data.clone()
    unpacked(data, width, 40)
    assert torch.equal(codes, kept) and torch.equal(data, again)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_wider_tensor_are_packed_the_same(width: int) -> None:
    wide = codes_of(width, 3, 60)
    cut = packed(wide[:, 5:42], width)
    assert torch.equal(cut, packed(wide[:, 5:42].clone(), width))
    beside = torch.cat([torch.zeros(3, 4, dtype=torch.uint8), cut], 1)
    assert torch.equal(unpacked(beside[:, 4:], width, 37), wide[:, 5:42])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 8, 13, 1000])
def test_sizes_are_known_without_the_numbers(width: int, n: int) -> None:
    data = packed(torch.empty(2, n, dtype=torch.uint8, device="meta"), width)
    assert data.shape == (2, math.ceil(n * width / 8)) and data.dtype == torch.uint8
    assert unpacked(data, width, n).shape == (2, n)
