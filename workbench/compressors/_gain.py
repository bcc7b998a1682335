"""Measures the sent share of a compressor's input, on each rank by itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.compressors._base import Compressor, inside
from workbench.compressors._measured import left_of
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Rank, outlined


class Gain:
    """Replaces a rank's compressor during one step and adds up squares over all its buckets.

        whole = ||x||^2;   sent = ||C(x)||^2           x: the gradient, and what error feedback adds to it

    The exchange stays bit-identical. It takes a copy of the bucket and a few passes over it.

    feeds: whether it keeps its unsent part, under error feedback
    """

    def __init__(self, of: Any, feeds: bool) -> None:
        self.of, self.feeds = of, feeds
        self.sent = self.whole = 0.0

    def __getattr__(self, name: str) -> Any:
        """Claims what the compressor claims."""
        return getattr(self.of, name)

    async def _unweighed(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        own: Tensor | None = await self.of.reduce(rank, bucket, memory)
        return own

    @outlined(_unweighed)
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        data: Tensor = bucket.data
        x = data.to(torch.promote_types(data.dtype, torch.float32), copy=True)
        if self.feeds:
            x += _left(memory, bucket, x)
        self.whole += _squares(x)
        own = await self._unweighed(rank, bucket, memory)
        sent = x - _left(memory, bucket, x) if self.feeds else own
        self.sent += _squares(x if sent is None else sent)
        return own

    def found(self) -> dict[str, float]:
        """Returns the Samples of this step; empty if the input is zero or a value is not finite."""
        finite = math.isfinite(self.sent) and math.isfinite(self.whole)
        return {"gradient_sent": self.sent, "gradient_whole": self.whole} if finite and self.whole else {}


def gains(compressor: Compressor) -> bool:
    """Whether the sent share can be measured. A compressor with its own kind of residual prevents it."""
    return all(c.residual in ("", ErrorFeedback.residual) for c in inside(compressor))


def feeds(compressor: Compressor) -> bool:
    """Whether the compressor keeps its unsent part."""
    return any(c.residual for c in inside(compressor))


def _left(memory: Memory, bucket: Bucket, like: Tensor) -> Tensor:
    return left_of(memory, bucket, like) if ErrorFeedback.residual in memory.buffers else torch.zeros_like(like)


def _squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
