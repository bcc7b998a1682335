"""Compressors that choose elements by value; their number may differ from rank to rank."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import deliver, wide
from workbench.compressors._uneven import gathered
from workbench.rank import Bucket, Memory, Rank, outlined


@dataclass(frozen=True, kw_only=True)
class Sparse(Compressor):
    """Keeps chosen elements. Every rank gathers all ranks' (index, value) pairs.

    Bytes sent by rank i for k_i kept elements in fp32: (p-1) * (8 + 8 k_i). One message holds the count, 32-bit indices
    and values. All ranks add up in rank order and in fp32 at least, so their results are bit-identical. The Sample
    "density" records the kept share.
    """

    varies: ClassVar[bool] = True
    kind: ClassVar[str] = "sparse"

    @abstractmethod
    def choose(self, x: Tensor, memory: Memory, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Returns indices `(k,)` int64 of `(n,)` without repetition, and the values `(k,)` to send for them."""

    async def _supposed(self, rank: Rank, bucket: Bucket, memory: Memory) -> tuple[Tensor, Tensor]:
        """Returns a share of `rank.density`, with sizes only."""
        x = bucket.data
        index = x.new_empty(max(1, round(rank.density * x.numel())), dtype=torch.int64)
        return index, x.new_empty(index.shape)

    @outlined(_supposed)
    async def _chosen(self, rank: Rank, bucket: Bucket, memory: Memory) -> tuple[Tensor, Tensor]:
        index, values = self.choose(bucket.data, memory, bucket)
        await rank.sample("density", index.numel() / bucket.data.numel())
        return index, values

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if not bucket.data.numel():
            return None
        return (await self.exchanged(rank, bucket, memory))[1]

    async def exchanged(self, rank: Rank, bucket: Bucket, memory: Memory) -> tuple[Tensor, Tensor]:
        """Writes the sum into a bucket with elements. Returns this rank's indices `(k,)` and contribution `(n,)`."""
        x = bucket.data
        mine, values = await self._chosen(rank, bucket, memory)
        every = await gathered(rank, message(mine, values), bucket.name)
        own = torch.zeros_like(x).index_add_(0, mine, values)
        total = x.zero_() if wide(x.dtype) == x.dtype else torch.zeros_like(x, dtype=wide(x.dtype))
        for one in every:
            index, values = opened(one, x.dtype)
            total.index_add_(0, index, values.to(total.dtype))
        return mine, deliver(total, x, own, rank.size)


def message(index: Tensor, values: Tensor) -> Tensor:
    """Returns indices `(k,)` below 2^31 and values `(k,)` as one message: `(k * (4 + element size),)` uint8."""
    return torch.cat([index.to(torch.int32).view(torch.uint8), values.contiguous().view(torch.uint8)])


def opened(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns indices `(k,)` int64 and values `(k,)` of `dtype` from the output of `message`."""
    k = message.numel() // (4 + dtype.itemsize)
    index, values = message.split([4 * k, dtype.itemsize * k])
    return index.clone().view(torch.int32).long(), values.clone().view(dtype)
