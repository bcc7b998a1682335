"""Random-k sparsification: all ranks send the same few random entries."""

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
    """Sends k = density * n entries of each bucket, drawn without replacement. All ranks draw the same.

        C(x)_i = x_i  if i is in S, else 0;   S is a random set of k places;   times n / k if `scaled`

    All ranks draw S from one seed, made of the bucket's first parameter and the count of its exchanges. So ranks send
    no indices, and an all-reduce adds up the values. Bytes sent per rank: 2 (p-1)/p * 4 k, less than Dense for any p.

    Without `scaled` it wants error feedback: the bare name RandomK means ErrorFeedback(of=RandomK()). Then each entry
    is sent once in n / k steps on average, with everything accumulated. With `scaled` it is unbiased by itself, and

        E||C(x) - x||^2 = (n / k - 1) ||x||^2

    so at 1 % the noise is 10 times as long as the gradient, and only small steps train. With `scaled`, error feedback
    would subtract n / k times the residual. So it is refused.

    When to use it: very slow networks and many ranks, because the bytes of TopK's all-gather grow with p. The entries
    are not the largest, so this is the baseline for other choices.

    If any number is not finite, drawn or not, all sent values are NaN.

    It draws from its own generator, not torch's global one.

    Reference: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
    https://arxiv.org/abs/1809.07599
    """

    density: float = knob(0.01, 0.0001, 1.0, log=True, doc="fraction of the entries that are sent")
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
            "scaled=True: under error feedback RandomK would send n / k times the residual's entries, so the "
            "residual would grow; use scaled=False with error feedback, or RandomK(scaled=True) without it"
        )

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x = bucket.data
        n = x.numel()
        if not n:
            return None
        k = max(1, round(self.density * n))
        index = self._drawn(bucket, memory, k)
        low, high = x.aminmax()  # a NaN must show even if it was not drawn: all sent values become NaN
        values = x[index].where(low.isfinite() & high.isfinite(), torch.nan)
        if self.scaled:
            values *= n / k
        own = torch.zeros_like(x).index_copy_(0, index, values)
        values = await rank.all_reduce(values, "sum", bucket.name)
        x.zero_().index_copy_(0, index, values)
        return own

    def _drawn(self, bucket: Bucket, memory: Memory, k: int) -> Tensor:
        """Returns new places in each step: `(k,)` int64. The count is kept by parameter and equal on all ranks."""
        x, sent = bucket.data, memory.parts.setdefault(self.buffer, {})
        count = max((sent.get(part.name, 0) for part in bucket.parts), default=0)
        sent.update((part.name, count + 1) for part in bucket.parts)
        return _subset_of(x, k, bucket.parts[0].name if bucket.parts else bucket.name, count)


@outlined(lambda x, k, name, count: x.new_empty(k, dtype=torch.int64))
def _subset_of(x: Tensor, k: int, name: str, count: int) -> Tensor:
    return subset(x.numel(), k, seeded(name, count)).to(x.device)


def seeded(name: str, count: int) -> Generator:
    """A CPU generator for this name and count, the same on all ranks."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {count}".encode()))


def subset(n: int, k: int, generator: Generator) -> Tensor:
    """Returns k of n places in random order: `(k,)` int64. Each set of k is equally likely.

    For a small k it allocates nothing of length n: it draws until k places differ, and takes k of these.
    """
    if 4 * k > n:
        return torch.randperm(n, generator=generator)[:k]
    draws = math.ceil(-n * math.log1p(-k / n) + 4 * math.sqrt(k)) + 4
    places = torch.randint(n, (draws,), generator=generator).unique()
    while places.numel() < k:
        places = torch.cat([places, torch.randint(n, (draws,), generator=generator)]).unique()
    return places[torch.randperm(places.numel(), generator=generator)[:k]]
