"""Quantisation levels that are refitted to the gradients during training."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._levels import Levels, exponential, norms
from workbench.compressors._mixture import Mixture
from workbench.rank import Bucket, Memory, Rank, each, outlined, values_of
from workbench.settings import knob

NUMBERS_PER_BLOCK = 3  # per block: its norm, and mean and deviation of its normalised elements


@dataclass(frozen=True, kw_only=True)
class Fitted(Levels):
    """Levels from a mixture of normal distributions, one for each sampled block, weighted with the blocks' norms.

    In step 0, step `fit_first`, step `fit_second` and every `fit_every` steps ranks exchange statistics before the
    codes. A bucket of k blocks describes the min(k, samples) blocks with the largest norms. A rank sends (p-1) 12
    min(k, samples) bytes. From the next step on, levels are optimal for the `samples` blocks with the largest norms of
    all buckets and ranks. Every rank computes them from the same numbers, in float64 rounded to float32. A step is an
    exchange of the bucket with the first parameter ever sent, even if buckets are recut.

    Before the first fit each bucket uses levels fitted to its own statistics, which are sent before its codes. If all
    values are zero or not finite, levels are `+-1, +-1/2, +-1/4, ...`. The next step then samples again. The sample
    belongs to the whole model, so a new number of bits gets levels from it at once. It depends on `block` and `norm`.
    After a change of these, one step samples again and fits levels to each bucket.

    Levels suit only the sampled gradients. For gradients with a residual their error is unbounded, so error feedback is
    refused.
    """

    bits: int = knob(3, 2, 8, doc="bits of a code")
    block: int = knob(8192, 8, 2**20, log=True, unit="elements", doc="elements that share a norm")
    fit_first: int = knob(100, 0, 10**9, unit="steps", doc="first step after which levels are fitted")
    fit_second: int = knob(2000, 0, 10**9, unit="steps", doc="second step after which levels are fitted")
    fit_every: int = knob(10_000, 1, 10**9, unit="steps", doc="period of further fits, from step 0 on")
    samples: int = knob(50, 1, 10_000, unit="blocks", doc="number of sampled blocks for a fit")

    buffer: ClassVar[str] = "levels"
    drops: ClassVar[tuple[str, ...]] = ("levels",)

    @property
    def strays(self) -> float:
        return math.inf

    def refuses_feedback(self) -> str | None:
        return (
            f"of={type(self).__name__}: its levels fit sampled gradients, so its error on a gradient plus a residual "
            f"has no bound; use it without error feedback, or use QSGD(bits=3) with error feedback"
        )

    @abstractmethod
    def solved(self, mixture: Mixture) -> Tensor:
        """Returns `(L,)` float64, L <= 2^bits: optimal levels for such elements. They ascend from -1 to 1."""

    def levels(self, memory: Memory) -> Tensor:
        fit = self._fit(memory)
        known = fit and (fit.model if self._serves(fit) else fit.bucket)
        if not known or known.mixture is None:
            return exponential(self.bits, 0.5, zero=False)
        key = f"{type(self).__name__} {self.bits}"
        if key not in known.levels:
            known.levels[key] = self.solved(known.mixture).float()
        return known.levels[key]

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if bucket.data.numel():
            await self._sample(rank, bucket, memory)
        return await super().reduce(rank, bucket, memory)

    @property
    def _basis(self) -> tuple[int, str]:
        return self.block, self.norm

    def _fit(self, memory: Memory) -> _Fit | None:
        fit: _Fit | None = memory.parts.get(self.buffer, {}).get("*")
        return fit

    def _serves(self, fit: _Fit) -> bool:
        return fit.basis == self._basis and fit.model.mixture is not None

    async def _sample(self, rank: Rank, bucket: Bucket, memory: Memory) -> None:
        """Samples this bucket's blocks on all ranks if a fit is due or none exists."""
        names = [part.name for part in bucket.parts] or [""]
        fit = self._fit(memory)
        if fit is None:
            fit = memory.parts.setdefault(self.buffer, {})["*"] = _Fit(names[0])
        if fit.lead in names:
            self._next(fit)
        if not fit.sampling and self._serves(fit):
            return
        mine = looks(self._chunks(bucket.data.float(), 1)[0], self.norm, self.samples)
        every = await rank.all_gather(mine.flatten(), bucket.name)
        seen = values_of(each(every), otherwise=1.0).view(-1, NUMBERS_PER_BLOCK).double().cpu()
        fit.bucket = _Known(self._mixture([seen]))
        if fit.sampling and fit.asked == self._basis:
            fit.found.append(seen)

    def _next(self, fit: _Fit) -> None:
        """Begins a step: from now on levels come from the last step's sample."""
        if fit.sampling:
            mixture = self._mixture(fit.found)
            if mixture is not None or fit.basis != fit.asked:
                fit.model = _Known(mixture)
            fit.basis = fit.asked
        fit.step += 1
        named = fit.step in (self.fit_first, self.fit_second) or fit.step % self.fit_every == 0
        fit.sampling = named or not self._serves(fit)
        fit.asked, fit.found = self._basis, []

    def _mixture(self, found: list[Tensor]) -> Mixture | None:
        """Returns the mixture of the sampled blocks with the largest norms; None if all norms are zero."""
        blocks = torch.cat([torch.empty(0, NUMBERS_PER_BLOCK, dtype=torch.float64), *found])
        blocks = blocks[blocks[:, 0] > 0]
        blocks = blocks[blocks[:, 0].topk(min(self.samples, len(blocks))).indices]
        return Mixture.of(blocks) if len(blocks) else None


@dataclass
class _Known:
    """Sampled blocks and the solved levels, by compressor and bits."""

    mixture: Mixture | None = None
    levels: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Fit:
    """The sample of one model's gradients on one rank; equal on all ranks."""

    lead: str  # the parameter whose exchanges count the steps
    step: int = -1
    sampling: bool = False  # whether the present step samples blocks
    asked: tuple[int, str] | None = None  # block and norm of the present sample
    found: list[Tensor] = field(default_factory=list)  # (m, 3) each
    basis: tuple[int, str] | None = None  # block and norm of the last complete sample
    model: _Known = field(default_factory=_Known)  # of all buckets, from the last sampled step
    bucket: _Known = field(default_factory=_Known)  # of the last sampled bucket


@outlined(lambda x, norm, most: x.new_empty(min(most, len(x)), NUMBERS_PER_BLOCK))
def looks(x: Tensor, norm: str, most: int) -> Tensor:
    """Returns statistics of the blocks with the largest norms: `(blocks, n)` -> `(min(blocks, most), 3)`. A non-finite
    block becomes 0.
    """
    size = norms(x, norm)
    r = x / size.where(size != 0, 1.0)
    seen = torch.cat([size, r.mean(-1, keepdim=True), r.std(-1, correction=0, keepdim=True)], -1)
    seen = torch.where(seen.isfinite().all(-1, keepdim=True), seen, 0.0)
    return seen.index_select(0, seen[:, 0].topk(min(most, len(seen))).indices)
