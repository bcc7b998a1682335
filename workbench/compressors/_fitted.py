"""Levels that are fitted now and then, while training, to what gradients look like."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._levels import Levels, exponential, norms
from workbench.compressors._mixture import Mixture
from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Rank

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

    Until there is a sample, levels are +-1, +-1/2, +-1/4, ... What was sampled is kept for the whole model: for another
    number of bits levels are solved from it at once. It depends on `block` and `norm`: where these change, the first
    levels serve for the one step in which it is sampled anew.
    """

    bits: int = knob(3, 2, 8, doc="bits of a code")
    block: int = knob(8192, 8, 2**20, log=True, unit="elements", doc="elements with a norm in common")
    fit_first: int = knob(100, 0, 10**9, unit="steps", doc="levels are fitted after this step")
    fit_second: int = knob(2000, 0, 10**9, unit="steps", doc="and after this one")
    fit_every: int = knob(10_000, 1, 10**9, unit="steps", doc="and every so many steps, beginning with step 0")
    samples: int = knob(50, 1, 10_000, unit="blocks", doc="how many blocks levels are fitted to")

    slot: ClassVar[str] = "levels"

    @abstractmethod
    def solved(self, mixture: Mixture) -> Tensor:
        """(L,) float64, L <= 2^bits: ascending from -1 to 1, best for such elements."""

    def levels(self, memory: Memory) -> Tensor:
        fit = self._fit(memory)
        if fit is None or fit.mixture is None or fit.basis != self._basis:
            return exponential(self.bits, 0.5, zero=False)
        key = f"{type(self).__name__} {self.bits}"
        if key not in fit.levels:
            fit.levels[key] = self.solved(fit.mixture).float()
        return fit.levels[key]

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if bucket.data.numel():
            await self._sample(rank, bucket, memory)
        return await super().reduce(rank, bucket, memory)

    @property
    def _basis(self) -> tuple[int, str]:
        return self.block, self.norm

    def _fit(self, memory: Memory) -> _Fit | None:
        fit: _Fit | None = memory.parts.get(self.slot, {}).get("*")
        return fit

    async def _sample(self, rank: Rank, bucket: Bucket, memory: Memory) -> None:
        """What this bucket's blocks look like on all ranks, if this is a step to look."""
        names = [part.name for part in bucket.parts] or [""]
        fit = self._fit(memory)
        if fit is None:
            fit = memory.parts.setdefault(self.slot, {})["*"] = _Fit(names[0])
        if fit.lead in names:
            self._next(fit)
        if not fit.sampling:
            return
        if fit.asked != self._basis:
            fit.asked, fit.found = self._basis, []
        mine = looks(self._chunks(bucket.data.float(), 1)[0], self.norm, self.samples)
        every = await rank.all_gather(mine.flatten(), bucket.name)
        if not every.is_meta:
            fit.found.append(every.view(-1, NUMBERS).double().cpu())

    def _next(self, fit: _Fit) -> None:
        """A step begins: what the last one sampled is what levels are solved from now on."""
        if fit.sampling:
            blocks = torch.cat([torch.empty(0, NUMBERS, dtype=torch.float64), *fit.found])
            blocks = blocks[blocks[:, 0] > 0]
            blocks = blocks[blocks[:, 0].topk(min(self.samples, len(blocks))).indices]
            if len(blocks) or fit.basis != fit.asked:
                fit.mixture = Mixture.of(blocks) if len(blocks) else None
                fit.levels = {}
            fit.basis, fit.found = fit.asked, []
        fit.step += 1
        known = fit.basis in (None, self._basis)
        fit.sampling = not known or fit.step in (self.fit_first, self.fit_second) or fit.step % self.fit_every == 0


@dataclass
class _Fit:
    """What is known of one model's gradients on one rank; equal on all."""

    lead: str  # the parameter whose exchanges count the steps
    step: int = -1
    sampling: bool = False  # is the present step one in which blocks are sampled?
    asked: tuple[int, str] | None = None  # block and norm of what is being sampled
    found: list[Tensor] = field(default_factory=list)  # (m, 3) each
    basis: tuple[int, str] | None = None  # block and norm of what was sampled last
    mixture: Mixture | None = None
    levels: dict[str, Tensor] = field(default_factory=dict)  # solved from it, by compressor and bits


def looks(x: Tensor, norm: str, most: int) -> Tensor:
    """(blocks, n) -> (min(blocks, most), 3): of the blocks with the largest norms. One that is not finite counts 0."""
    if x.is_meta:
        return x.new_empty(min(most, len(x)), NUMBERS)
    size = norms(x, norm)
    r = x / size.where(size != 0, 1.0)
    seen = torch.cat([size, r.mean(-1, keepdim=True), r.std(-1, correction=0, keepdim=True)], -1)
    seen = torch.where(seen.isfinite().all(-1, keepdim=True), seen, 0.0)
    return seen.index_select(0, seen[:, 0].topk(min(most, len(seen))).indices)
