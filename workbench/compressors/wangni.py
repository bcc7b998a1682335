"""Wangni's unbiased sparsification: random entries survive, larger ones more likely."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import deliver, wide
from workbench.compressors._select import above, unset
from workbench.compressors._sparse import message, opened
from workbench.compressors._two_hop import packed, unpacked
from workbench.compressors._uneven import gathered
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Wangni(Compressor):
    """Sends each entry with a probability that grows with its magnitude, amplified to compensate.

        p_i = min(1, |x_i| / u);   C(x)_i = x_i / p_i  with chance p_i, else 0

    Unbiased, with the least variance of all p_i with the same expected number of entries. Only u has to be found:

        rule = "density":   sum_i p_i = density * n, the expected number of survivors (the paper's greedy rule)
        rule = "variance":  sum_i x_i^2 / p_i = (1 + variance) ||x||^2, with as few survivors as that takes

    A survivor below u becomes exactly u or -u, so it travels as a 32-bit index and one bit. A survivor of u or more is
    sent whole, as index and value. In fp32 a rank with s whole entries and m other ones sends

        (p-1) * (8 + 8 + 8 s + 4 m + ceil(m / 8)) bytes:  the message's length;  u and s;  what survived

    and s / n is the Sample "whole". It has no state, and each rank draws for itself. Under error feedback noise larger
    than the gradient would grow. So error feedback accepts only a variance below 1.

    When to use it: few large entries among many small ones. It has no state that a change could lose. On normal entries
    the noise is 0.64 / density - 1 times ||x||^2, against 1 / density - 1 for RandomK. It falls as magnitudes differ
    more.

    Newton's method finds u exactly and without sorting, on a convex function that is linear between entries. Each round
    lowers u and makes all entries that reach it whole. The paper's greedy rule is 2 rounds. Zeros are never sent.

    Reference: Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient Distributed
    Optimization", NeurIPS 2018, https://arxiv.org/abs/1710.09854
    """

    rule: str = knob("density", choices=("density", "variance"), doc="which of the two knobs below applies")
    density: float = knob(0.05, 0.0001, 1.0, log=True, doc="fraction of the entries that survive, on average")
    variance: float = knob(1.0, 0.01, 100.0, log=True, doc="added variance, in units of the squared norm")

    unbiased: ClassVar[bool] = True
    varies: ClassVar[bool] = True
    kind: ClassVar[str] = "sparse"

    def refuses_feedback(self) -> str | None:
        if self.rule == "variance" and self.variance < 1:
            return None
        return (
            "of=Wangni: its noise is larger than the gradient, so it would grow under error feedback; use it without "
            "error feedback, set rule=variance and variance below 1, or use TopK with error feedback"
        )

    async def _supposed(self, rank: Rank, x: Tensor, memory: Memory) -> Tensor:
        """A message with a share of `rank.density` and no whole entries, with sizes only."""
        k = max(1, round(rank.density * x.numel()))
        return x.new_empty(8 + 4 * k + -(-k // 8), dtype=torch.uint8)

    @outlined(_supposed)
    async def _drawn(self, rank: Rank, x: Tensor, memory: Memory) -> Tensor:
        sent, kept, whole = self._message(x, memory)
        await rank.sample("density", kept / x.numel())
        await rank.sample("whole", whole / x.numel())
        return sent

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x = bucket.data
        if not x.numel():
            return None
        sent = await self._drawn(rank, x, memory)
        every = await gathered(rank, sent, bucket.name)
        own = _add(torch.zeros_like(x), sent, x.dtype)
        total = torch.zeros_like(x, dtype=wide(x.dtype))
        for one in every:
            _add(total, one, x.dtype)
        return deliver(total, x, own, rank.size)

    def _message(self, x: Tensor, memory: Memory) -> tuple[Tensor, int, int]:
        """Returns u, the whole entries and their number, the other places and signs, as uint8. Also returns both
        counts.
        """
        size = x.abs().to(wide(x.dtype))
        top = torch.finfo(torch.float32 if x.dtype == torch.float64 else x.dtype).max
        u = torch.tensor([min(self.scale_of(size), top)], dtype=torch.float32, device=x.device)
        u = u.to(x.dtype).float()  # every survivor's value must be exact in its dtype
        chance = torch.rand(size.shape, generator=memory.generator(x.device), device=x.device)
        kept = unset(chance.mul_(u) >= size)
        below = size[kept] < u
        whole, rest = kept[~below], kept[below]
        head = torch.cat([u.view(torch.uint8), kept.new_tensor([whole.numel()], dtype=torch.int32).view(torch.uint8)])
        signs = packed((x[rest] < 0).view(torch.uint8)[None], 1)[0]
        parts = [head, message(whole, x[whole]), rest.to(torch.int32).view(torch.uint8), signs]
        return torch.cat(parts), kept.numel(), whole.numel()

    def scale_of(self, size: Tensor) -> float:
        """Returns u for magnitudes `(n,)` of at least float32."""
        total = float(size.sum(dtype=torch.float64))
        if not math.isfinite(total):
            size = size.nan_to_num(0.0, 0.0, 0.0)
            total = float(size.sum(dtype=torch.float64))
        if not total:
            return 0.0
        if self.rule == "density":
            wanted = max(1.0, self.density * size.numel())
            return _settled(size, total / wanted, lambda s: _ratio(total - _sum(s), wanted - s.numel()))
        budget = (1 + self.variance) * _sum(size.square())
        return _settled(size, budget / total, lambda s: _ratio(budget - _sum(s.square()), total - _sum(s)))


def _settled(size: Tensor, u: float, smaller: Callable[[Tensor], float]) -> float:
    """Lowers u with `smaller` until u stays the same. `smaller` takes the magnitudes that reach u."""
    while True:
        found = smaller(size[above(size, u)])
        if not found < u * (1 - 1e-9):
            return u
        u = found


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def _ratio(a: float, b: float) -> float:
    """Returns a / b if both are positive, 0 if only b is. Infinity if b is not positive."""
    return max(a, 0.0) / b if b > 0 else math.inf


@outlined(lambda out, *_: out)
def _add(out: Tensor, data: Tensor, kind: torch.dtype) -> Tensor:
    u, count = data[:4].clone().view(torch.float32), int(data[4:8].clone().view(torch.int32))
    whole = count * (4 + kind.itemsize)
    pairs, data = data[8:].split([whole, data.numel() - 8 - whole])
    index, values = opened(pairs, kind)
    out.index_add_(0, index, values.to(out.dtype))
    m = 8 * data.numel() // 33  # 4 m bytes of places and ceil(m / 8) of signs
    index, signs = data[: 4 * m].clone().view(torch.int32).long(), unpacked(data[None, 4 * m :], 1, m)[0]
    return out.index_add_(0, index, (u * (1.0 - 2.0 * signs.float())).to(out.dtype))
