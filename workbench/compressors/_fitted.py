"""Levels that are fitted now and then, while training, to what gradients look like."""

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

NUMBERS = 3  # that a block sends: its norm, and its normalised elements' mean and deviation


@dataclass(frozen=True, kw_only=True)
class Fitted(Levels):
    """Levels from a mixture of normal distributions, one for each sampled block, weighted with the blocks' norms.

    In step 0, step `fit_first`, step `fit_second` and every `fit_every` steps each rank tells all others, before the
    codes of a bucket of k blocks, what the min(k, samples) of them with the largest norms look like: (p-1) 12 min(k,
    samples) bytes. From the next step on, levels are those best for the `samples` blocks that have the largest norms
    of all buckets and ranks. Every rank solves for them by itself, from the same numbers, in float64 rounded to
    float32. Steps are counted by exchanges of the bucket that holds the first parameter ever sent, however buckets
    are cut later.

    Until there is such a sample each bucket is sampled, and levels are best for what the ranks say of this very bucket,
    which crosses before its codes do: so the first step, too, is rounded to levels that suit it. Where nothing can be
    seen, for all is zero or not finite, levels are +-1, +-1/2, +-1/4, ..., and the next step is sampled again. What was
    sampled is kept for the whole model: for another number of bits levels are solved from it at once. It depends on
    `block` and `norm`: where these change, a step is sampled anew, each bucket with levels of its own.

    Levels suit what was sampled. What a residual would make of later gradients they were not fitted to, and nothing
    bounds what they cost for it, so error feedback is refused.
    """

    bits: int = knob(3, 2, 8, doc="bits of a code")
    block: int = knob(8192, 8, 2**20, log=True, unit="elements", doc="elements that share a norm")
    fit_first: int = knob(100, 0, 10**9, unit="steps", doc="levels are fitted after this step")
    fit_second: int = knob(2000, 0, 10**9, unit="steps", doc="and after this one")
    fit_every: int = knob(10_000, 1, 10**9, unit="steps", doc="and every so many steps, beginning with step 0")
    samples: int = knob(50, 1, 10_000, unit="blocks", doc="how many blocks levels are fitted to")

    buffer: ClassVar[str] = "levels"
    drops: ClassVar[tuple[str, ...]] = ("levels",)

    @property
    def strays(self) -> float:
        return math.inf

    def refuses_feedback(self) -> str | None:
        return (
            f"of={type(self).__name__}: its levels fit what was sampled, and nothing bounds what they cost for what a "
            "residual makes of later gradients; use it without error feedback, or QSGD(bits=3) with it"
        )

    @abstractmethod
    def solved(self, mixture: Mixture) -> Tensor:
        """(L,) float64, L <= 2^bits: ascending from -1 to 1, best for such elements."""

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
        """Is what is known of the model a sample of such blocks?"""
        return fit.basis == self._basis and fit.model.mixture is not None

    async def _sample(self, rank: Rank, bucket: Bucket, memory: Memory) -> None:
        """What this bucket's blocks look like on all ranks, if this is a step to look or nothing is known yet."""
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
        seen = values_of(each(every), otherwise=1.0).view(-1, NUMBERS).double().cpu()
        fit.bucket = _Known(self._mixture([seen]))
        if fit.sampling and fit.asked == self._basis:
            fit.found.append(seen)

    def _next(self, fit: _Fit) -> None:
        """A step begins: what the last one sampled is what levels are solved from now on."""
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
        """Of the blocks with the largest norms among those that were found; None where all norms are zero."""
        blocks = torch.cat([torch.empty(0, NUMBERS, dtype=torch.float64), *found])
        blocks = blocks[blocks[:, 0] > 0]
        blocks = blocks[blocks[:, 0].topk(min(self.samples, len(blocks))).indices]
        return Mixture.of(blocks) if len(blocks) else None


@dataclass
class _Known:
    """Blocks that were looked at, and the levels solved from them, by compressor and bits."""

    mixture: Mixture | None = None
    levels: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Fit:
    """What is known of one model's gradients on one rank; equal on all."""

    lead: str  # the parameter whose exchanges count the steps
    step: int = -1
    sampling: bool = False  # is the present step one in which blocks are sampled?
    asked: tuple[int, str] | None = None  # block and norm of what is being sampled
    found: list[Tensor] = field(default_factory=list)  # (m, 3) each
    basis: tuple[int, str] | None = None  # block and norm of what was sampled last
    model: _Known = field(default_factory=_Known)  # of all buckets, from the last step that was sampled
    bucket: _Known = field(default_factory=_Known)  # of the last bucket that was sampled


@outlined(lambda x, norm, most: x.new_empty(min(most, len(x)), NUMBERS))
def looks(x: Tensor, norm: str, most: int) -> Tensor:
    """(blocks, n) -> (min(blocks, most), 3): of the blocks with the largest norms. One that is not finite counts 0."""
    size = norms(x, norm)
    r = x / size.where(size != 0, 1.0)
    seen = torch.cat([size, r.mean(-1, keepdim=True), r.std(-1, correction=0, keepdim=True)], -1)
    seen = torch.where(seen.isfinite().all(-1, keepdim=True), seen, 0.0)
    return seen.index_select(0, seen[:, 0].topk(min(most, len(seen))).indices)
