"""Sizes only, answered for below the members: what is outlined, what is read, and what stands for all rows."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch

from workbench.rank import Bucket, Memory, each, outlined, values_of

REAL, SIZES = torch.tensor([3.0, -4.0]), torch.empty(2, device="meta")


class Kept:
    """A function and a coroutine whose result depends on values."""

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


def test_a_coroutine_stays_one_and_buckets_are_looked_into() -> None:
    assert inspect.iscoroutinefunction(Kept.count)
    assert asyncio.run(Kept().count(Bucket(0, REAL, (), 0))) == 1
    assert asyncio.run(Kept().count(Bucket(0, SIZES, (), 0))) == 2


def test_the_first_tensor_decides_also_in_a_list() -> None:
    @outlined(lambda *_: "sizes")
    def which(n: int, x: list[torch.Tensor], y: torch.Tensor) -> str:
        return "values"

    assert which(1, [SIZES], REAL) == "sizes"
    assert which(1, [REAL], SIZES) == "values"
    assert which(1, [], SIZES) == "sizes"


def test_what_cannot_be_read_is_what_it_is_taken_for() -> None:
    assert values_of(REAL, otherwise=7.0) is REAL
    assert values_of(SIZES, otherwise=7.0).tolist() == [7.0, 7.0]
    with pytest.raises(RuntimeError):
        SIZES.tolist()


def test_one_row_says_all_of_sizes() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert each(rows).tolist() == rows.tolist()
    assert each(rows.to("meta")).shape == (1, 2)


def test_nothing_is_drawn_for_sizes() -> None:
    assert Memory(1).generator(SIZES.device) is None
    named, found = Memory(1).generator("cpu"), Memory(1).generator(REAL.device)
    assert torch.rand(1, generator=named) == torch.rand(1, generator=found)
