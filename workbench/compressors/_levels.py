"""Stochastic rounding to one of the 2 neighbouring levels, which keeps the mean."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._stochastic import dithered
from workbench.compressors._two_hop import Coded
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Levels(Coded):
    """Rounds elements in units of a norm to levels l_0 = -1 < ... < l_last = 1.

        r = x / N, N the norm of x's block;   C(x) = N l_k or N l_(k+1), where l_k <= r <= l_(k+1),
        the upper one with probability (r - l_k) / (l_(k+1) - l_k), so E C(x) = x whatever the levels

    A bucket of n elements is cut into k = ceil(n / block) blocks of equal length. A message is the norms (float32),
    then the packed codes. With "gather" every rank sends its message to all ranks, and all add up in the same order:
    (p-1) (4 k + n bits / 8) bytes sent per rank. Each element is rounded once. "two_hop" is Coded's exchange: 2 (p-1)
    (4 k' + m bits / 8) bytes for chunks of m = n / p elements in k' blocks. It sends less from 3 ranks on, but rounds
    the sum again. Both roundings are independent, so both exchanges are unbiased.

    A block of zeros has the norm 0 and stays zero. A block with a non-finite number becomes NaN.

    Under ErrorFeedback the unsent part must shrink. With the maximum norm no element is off by more than the widest gap
    between levels, in units of the maximum. This is a contraction in that norm if the gap is below 1. With the L2 norm
    the error's mean square is at most `worst` times the input's. For QSGD that is q - 1 with q = sqrt(d) / s (q^2 / 4
    if q < 2). So error feedback needs sqrt(d) < 2 s. With 2 hops the second hop rounds the sum of the first results and
    adds as much error again. Other settings are refused.
    """

    bits: int = knob(4, 2, 8, doc="bits of a code")
    block: int = knob(512, 8, 2**20, log=True, unit="elements", doc="elements that share a norm")
    norm: str = knob("l2", choices=("l2", "max"), doc="the norm that elements are divided by")
    exchange: str = knob(
        "gather",
        choices=("gather", "two_hop"),
        doc="gather: each rank gets all codes; two_hop: sums are quantised again",
    )

    unbiased: ClassVar[bool] = True
    scalars: ClassVar[int] = 1
    repeats: ClassVar[bool] = False
    even: ClassVar[bool] = False  # whether levels are equally spaced, which needs no table

    @property
    def width(self) -> int:
        return self.bits

    @property
    def strays(self) -> float:
        levels = self.levels(Memory()).double()
        once = float(levels.diff().max()) if self.norm == "max" else worst(levels, self.block) ** 0.5
        longest = 1.0 if self.norm == "max" else (1 + once**2) ** 0.5  # length of the second rounding's input, per rank
        return once if self.exchange == "gather" else once * (1 + longest)

    def refuses_feedback(self) -> str | None:
        if self.strays < 1:
            return None
        some = (replace(self, norm="max", exchange="gather", bits=bits) for bits in range(self.bits, 9))
        good = next((c for c in some if c.strays < 1), None)
        name = type(self).__name__
        other = f"norm=max with exchange=gather and bits={good.bits}" if good else "QSGD(bits=3)"
        return (
            f"of={name}(bits={self.bits}, block={self.block}, norm={self.norm}, exchange={self.exchange}): its error "
            f"can be {self.strays:.3g} times as long as its input, so it would grow under error feedback; use it "
            f"without error feedback, or use {other}"
        )

    @abstractmethod
    def levels(self, memory: Memory) -> Tensor:
        """Returns `(L,)` float32, L <= 2^bits. They ascend from -1 to 1 and are equal on all ranks."""

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if self.exchange == "two_hop":
            return await super().reduce(rank, bucket, memory)
        return await self.gathered(rank, bucket, memory)

    @outlined(lambda self, x, _: (x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(*x.shape[:-1], 1)))
    def quantise(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        size = norms(x, self.norm)
        levels = self.levels(memory).to(x.device)
        r = x / size.where(size != 0, 1.0)
        top = len(levels) - 1
        y = torch.add(r.new_tensor(top / 2), r, alpha=top / 2, out=r) if self.even else between(r, levels)
        return dithered(y, memory.generator(x.device), top=top), size.where(size.isfinite(), torch.nan)

    @outlined(lambda self, codes, scales, _: scales.new_empty(codes.shape))
    def restore(self, codes: Tensor, scales: Tensor, memory: Memory) -> Tensor:
        levels = self.levels(memory).to(codes.device)
        if self.even:
            half = (len(levels) - 1) / 2
            return codes.float().sub_(half).mul_(scales / half)
        return levels.index_select(0, codes.flatten().int()).view(codes.shape).mul_(scales)


def norms(x: Tensor, which: str) -> Tensor:
    """Returns each row's norm: `(..., n)` -> `(..., 1)`. Scaled so that no square overflows or underflows."""
    peak = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    if which == "max":
        return peak
    return torch.linalg.vector_norm(x / peak.where(peak != 0, 1.0), dim=-1, keepdim=True).mul_(peak)


def between(r: Tensor, levels: Tensor) -> Tensor:
    """(...) in [-1, 1] -> (...): k plus the fraction of the way from level k to level k + 1. Reuses r's storage."""
    k = torch.bucketize(r, levels, out_int32=True, right=True).sub_(1).clamp_(0, len(levels) - 2)
    low, step = levels[:-1], levels.diff()
    flat = k.flatten()
    return r.sub_(low.index_select(0, flat).view(r.shape)).div_(step.index_select(0, flat).view(r.shape)).add_(k)


def worst(levels: Tensor, d: int) -> float:
    """Returns the maximum of E |C(x) - x|^2 / |x|^2, rounded to `levels`, for d elements in units of their L2 norm.

    It maximises the sum of (l_(k+1) - r)(r - l_k) over d elements r with squares that add up to 1. By duality this is a
    minimum over a >= 0. It minimises a plus d times the largest (l_(k+1) - r)(r - l_k) - a r^2. That is convex in a, so
    a ternary search finds it.
    """
    low, high = levels[:-1], levels[1:]

    def bound(a: float) -> float:
        r = torch.minimum(torch.maximum((low + high) / (2 * (1 + a)), low), high)
        return a + d * float(((high - r) * (r - low) - a * r * r).max())

    left, right = 0.0, float(d)
    for _ in range(80):
        a, b = left + (right - left) / 3, right - (right - left) / 3
        left, right = (left, b) if bound(a) < bound(b) else (a, right)
    return min(bound(0.0), bound((left + right) / 2))


def exponential(bits: int, multiplier: float, zero: bool) -> Tensor:
    """Returns the levels `0, +-1, +-multiplier, +-multiplier^2, ...` There are as many as `bits` can encode: `(L,)`
    float32.
    """
    up = [multiplier**j for j in reversed(range(2 ** (bits - 1) - zero))]
    return torch.tensor([-level for level in reversed(up)] + [0.0] * zero + up)
