"""What a compressor does to an exchange, found by making the dense exchange beside it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Op, Rank, outlined


class Measured:
    """Stands in for a rank's compressor during one step and compares what it gives with what Dense would have given.

        error = ||out - sum|| / ||sum||;   cosine = <out, sum> / (||out|| ||sum||);   residual = ||sum of e|| / ||sum||

    over all buckets of the step: `sum` is that of the data themselves over all ranks, `out` what the compressor made
    of them, e what a rank has left unsent under error feedback. The residuals are added up before the norm is taken:
    what differs between ranks cancels out there and is no loss, so a mean of the ranks' norms would say too much.

    Costs an all-reduce in fp32 per bucket, under error feedback two, marked as measuring. The exchange itself stays
    the same to the bit: nothing is remembered, and no random number is drawn.

    looks: False only notes whether anything was exchanged
    """

    def __init__(self, of: Any, looks: bool) -> None:
        self.of, self.looks = of, looks
        self.used = False
        self._squares = {"sum": 0.0, "out": 0.0, "off": 0.0, "left": 0.0}
        self._owes = False

    def __getattr__(self, name: str) -> Any:
        """What it claims is what the compressor claims."""
        return getattr(self.of, name)

    async def _unlooked(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        self.used = True
        own: Tensor | None = await self.of.reduce(rank, bucket, memory)
        return own

    @outlined(_unlooked)
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        """The compressor's own."""
        data: Tensor = bucket.data
        if not self.looks or not data.numel():
            return await self._unlooked(rank, bucket, memory)
        exact = data.to(torch.promote_types(data.dtype, torch.float32), copy=True)
        own = await self._unlooked(rank, bucket, memory)
        await _aside(rank.all_reduce(exact, "sum", bucket.name))
        self._add("sum", exact)
        self._add("out", bucket.data)
        self._add("off", bucket.data - exact)
        if ErrorFeedback.residual in memory.buffers:
            left = left_of(memory, bucket, exact)
            await _aside(rank.all_reduce(left, "sum", bucket.name))
            self._add("left", left)
            self._owes = True
        return own

    def _add(self, what: str, x: Tensor) -> None:
        self._squares[what] += float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2

    def found(self) -> dict[str, float]:
        """The Samples of this step; none where nothing was to be sent, or what was is not finite."""
        exact, out, off, left = self._squares.values()
        if not exact or not all(map(math.isfinite, (exact, out, off, left))):
            return {}
        found = {"compression_error": math.sqrt(off / exact)}
        if out:
            found["compression_cosine"] = min(1.0, (out + exact - off) / (2 * math.sqrt(out * exact)))
        if self._owes:
            found["residual_ratio"] = math.sqrt(left / exact)
        return found


def lossy(compressor: Compressor) -> bool:
    """Is there anything to measure?"""
    return not compressor.lossless


def _aside(op: Op) -> Op:
    op.measures = True
    return op


def left_of(memory: Memory, bucket: Bucket, like: Tensor) -> Tensor:
    """What this rank has left unsent of `bucket`: (n,), zero where nothing is remembered."""
    out = torch.zeros_like(like)
    pieces = memory.buffers[ErrorFeedback.residual]
    for part in bucket.parts:
        if part.name in pieces:
            out[part.start : part.stop] = pieces[part.name]
    return out
