"""Tests functions with an outline for sizes only: which are outlined, which read values, and rows."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch

from workbench.rank import Bucket, Memory, each, outlined, values_of

REAL, SIZES = torch.tensor([3.0, -4.0]), torch.empty(2, device="meta")


class Kept:
    """A function and a coroutine whose results depend on values."""

    def _half(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.numel() // 2)

    async def _same(self, bucket: Bucket) -> int:
        return bucket.data.numel()

    @outlined(_half)
    def positive(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    @outlined(_same)
    async def count(self, bucket: Bucket) -> int:
        return int((bucket.data > 0).sum())


def test_values_are_computed_and_sizes_are_outlined() -> None:
    assert Kept().positive(REAL).tolist() == [3.0]
    assert Kept().positive(SIZES).shape == (1,)


def test_an_outlined_coroutine_stays_one_and_its_buckets_are_inspected() -> None:
    assert inspect.iscoroutinefunction(Kept.count)
    assert asyncio.run(Kept().count(Bucket(0, REAL, (), 0))) == 1
    assert asyncio.run(Kept().count(Bucket(0, SIZES, (), 0))) == 2


def test_the_first_tensor_decides_even_in_a_list() -> None:
    @outlined(lambda *_: "sizes")
    def which(n: int, x: list[torch.Tensor], y: torch.Tensor) -> str:
        return "values"

    assert which(1, [SIZES], REAL) == "sizes"
    assert which(1, [REAL], SIZES) == "values"
    assert which(1, [], SIZES) == "sizes"


def test_values_that_cannot_be_read_get_the_given_default() -> None:
    assert values_of(REAL, otherwise=7.0) is REAL
    assert values_of(SIZES, otherwise=7.0).tolist() == [7.0, 7.0]
    with pytest.raises(RuntimeError):
        SIZES.tolist()


def test_one_row_stands_for_all_rows_with_sizes_only() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert each(rows).tolist() == rows.tolist()
    assert each(rows.to("meta")).shape == (1, 2)


def test_no_random_numbers_are_drawn_for_sizes() -> None:
    assert Memory(1).generator(SIZES.device) is None
    named, found = Memory(1).generator("cpu"), Memory(1).generator(REAL.device)
    assert torch.rand(1, generator=named) == torch.rand(1, generator=found)
