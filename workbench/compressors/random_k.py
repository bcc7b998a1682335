"""Random-k sparsification: all ranks send the same few entries, drawn by chance."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Of each bucket k = density * n entries cross the wire, drawn without replacement, the same on all ranks.

        C(x)_i = x_i  if i is in S, else 0;   S is a random set of k places;   times n / k if `scaled`

    All ranks draw S from one seed, made of the bucket's first parameter and of how often its entries were sent, so no
    index travels and an all-reduce adds the values up: 2 (p-1)/p * 4 k bytes sent per rank, for any number of ranks
    less than dense.

    As it is, it wants error feedback: the bare name RandomK means ErrorFeedback(of=RandomK()), under which each entry
    is sent once in n / k steps on average, with all that has come together. With `scaled` it is unbiased by itself, and

        E||C(x) - x||^2 = (n / k - 1) ||x||^2

    so at 1 % the noise is ten times as long as the gradient: it trains with small steps only. Scaled under error
    feedback it would take n / k times what is owed, and is refused.

    When to use it: very slow wires and many ranks, where the bytes of TopK's all-gather grow with their number. What is
    sent is not the largest; any cleverer choice must do better than this one.

    Where a number is not finite, drawn or not, all that is sent is NaN.

    Public code was found to draw with replacement, so that fewer than k entries are sent, and to seed torch's global
    random numbers in every step, those of dropout, too. This one has random numbers of its own.

    Reference: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
    https://arxiv.org/abs/1809.07599
    """

    density: float = knob(0.01, 0.0001, 1.0, log=True, doc="fraction of the entries that cross the wire")
    scaled: bool = knob(False, doc="entries are sent times n / k: unbiased, for use without error feedback")

    linear: ClassVar[bool] = True
    buffer: ClassVar[str] = "random_k"
    drops: ClassVar[tuple[str, ...]] = ("random_k",)
    kind: ClassVar[str] = "sparse"

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def refuses_feedback(self) -> str | None:
        if not self.scaled:
            return None
        return (
            "scaled=True: under error feedback RandomK would take n / k times what is owed, and the rest would grow; "
            "use scaled=False with it, or RandomK(scaled=True) without"
        )

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x = bucket.data
        n = x.numel()
        if not n:
            return None
        k = max(1, round(self.density * n))
        index = self._drawn(bucket, memory, k)
        low, high = x.aminmax()  # a NaN that was not drawn must not stay unseen: then all that is sent is NaN
        values = x[index].where(low.isfinite() & high.isfinite(), torch.nan)
        if self.scaled:
            values *= n / k
        own = torch.zeros_like(x).index_copy_(0, index, values)
        values = await rank.all_reduce(values, "sum", bucket.name)
        x.zero_().index_copy_(0, index, values)
        return own

    def _drawn(self, bucket: Bucket, memory: Memory, k: int) -> Tensor:
        """Places (k,) int64, other ones in each step: the count is kept by parameter and is equal on all ranks."""
        x, sent = bucket.data, memory.parts.setdefault(self.buffer, {})
        count = max((sent.get(part.name, 0) for part in bucket.parts), default=0)
        sent.update((part.name, count + 1) for part in bucket.parts)
        return _subset_of(x, k, bucket.parts[0].name if bucket.parts else bucket.name, count)


@outlined(lambda x, k, name, count: x.new_empty(k, dtype=torch.int64))
def _subset_of(x: Tensor, k: int, name: str, count: int) -> Tensor:
    return subset(x.numel(), k, seeded(name, count)).to(x.device)


def seeded(name: str, count: int) -> Generator:
    """Random numbers that are the same on all ranks and others for each name and count. They are the CPU's."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {count}".encode()))


def subset(n: int, k: int, generator: Generator) -> Tensor:
    """k of n places, each set of them equally likely: (k,) int64, in random order.

    Where k is small nothing of length n is made: as many are drawn as give k different ones, and k of these are taken.
    """
    if 4 * k > n:
        return torch.randperm(n, generator=generator)[:k]
    draws = math.ceil(-n * math.log1p(-k / n) + 4 * math.sqrt(k)) + 4
    places = torch.randint(n, (draws,), generator=generator).unique()
    while places.numel() < k:
        places = torch.cat([places, torch.randint(n, (draws,), generator=generator)]).unique()
    return places[torch.randperm(places.numel(), generator=generator)[:k]]
