"""Measures a compressor's error by making the dense exchange as well."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Op, Rank, outlined


class Measured:
    """Replaces a rank's compressor during one step and compares its result with that of Dense.

        error = ||out - sum|| / ||sum||;   cosine = <out, sum> / (||out|| ||sum||);   residual = ||sum of e|| / ||sum||

    over all buckets of the step. `sum` is the exact sum of the data over all ranks. `out` is the compressor's result. e
    is a rank's unsent part under error feedback. The ranks' residuals are added before the norm is taken, because
    opposite residuals cancel out and lose nothing.

    A bucket costs an all-reduce in fp32, or 2 under error feedback. They are marked as measuring. The exchange itself
    stays bit-identical: it stores nothing and draws no random numbers.

    looks: False only records whether an exchange took place
    """

    def __init__(self, of: Any, looks: bool) -> None:
        self.of, self.looks = of, looks
        self.used = False
        self._squares = {"sum": 0.0, "out": 0.0, "off": 0.0, "left": 0.0}
        self._owes = False

    def __getattr__(self, name: str) -> Any:
        """Claims what the compressor claims."""
        return getattr(self.of, name)

    async def _unlooked(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        self.used = True
        own: Tensor | None = await self.of.reduce(rank, bucket, memory)
        return own

    @outlined(_unlooked)
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
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
        """Returns the Samples of this step; empty if the sum is zero or a value is not finite."""
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
    """Whether the compressor has an error to measure."""
    return not compressor.lossless


def _aside(op: Op) -> Op:
    op.measures = True
    return op


def left_of(memory: Memory, bucket: Bucket, like: Tensor) -> Tensor:
    """Returns the part of `bucket` that this rank has not sent: `(n,)`. Zero without a residual."""
    out = torch.zeros_like(like)
    pieces = memory.buffers[ErrorFeedback.residual]
    for part in bucket.parts:
        if part.name in pieces:
            out[part.start : part.stop] = pieces[part.name]
    return out
