"""Uncompressed steps that send a residual after error feedback ends, whole or in shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import wide
from workbench.compressors._sketch import sketch
from workbench.compressors.dense import Dense
from workbench.compressors.error_feedback import ErrorFeedback, unsent, write_clamped
from workbench.rank import Bucket, Memory, Rank


@dataclass(frozen=True, kw_only=True)
class _Leaving(Compressor):
    """Sends every gradient whole by `of`, with a share of error feedback's residual.

        out = sum over ranks of (grad + share * residual);   residual <- (1 - share) * residual

    With shares of `1/M, 1/(M-1), ..., 1` the residual is gone after M steps. If the memory has a buffer `asked`, rank 0
    stores a sketch of each bucket's result there.

    of: sends everything, also a residual of its own
    """

    share: float = 1.0
    of: Compressor = Dense()

    linear: ClassVar[bool] = True
    residual: ClassVar[str] = ErrorFeedback.residual
    asked: ClassVar[str] = "leaving"
    drops: ClassVar[tuple[str, ...]] = (asked,)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        residual = memory.flat(ErrorFeedback.residual, bucket, wide(bucket.data.dtype))
        x = bucket.data + residual
        part = bucket.data + self.share * residual
        rounded = write_clamped(bucket, part)
        await self.of.reduce(rank, bucket, memory)
        left = unsent(residual, x, part if rounded is None else rounded, bucket.data)
        memory.keep(ErrorFeedback.residual, bucket, left)
        if rank.index == 0 and self.asked in memory.parts:
            found = torch.stack([sketch(bucket.data[p.start : p.stop], p.name) for p in bucket.parts])
            memory.parts[self.asked].setdefault(bucket.name, found.sum(0))
        return None
