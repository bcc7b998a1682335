"""Shared by strategies with a shadow: records of its rounds, and how a round begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workbench.rank import Bucket, Memory, Rank
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class Shadowing(Strategy):
    """A strategy with a shadow.

    piece_kb: how much of a bucket ranks average at a time, in kB. 0: the whole bucket
    """

    piece_kb: ClassVar[float] = 0.0

    async def replica(self, rank: Rank) -> list[Bucket]:
        """Returns the parameters that the shadow synchronises."""
        return list(await rank.params())


class Shadow:
    """State of one rank's shadow: the step in which its last round began, and its memory."""

    def __init__(self, rank: Rank, memory: Memory) -> None:
        self.memory = memory
        self._last = rank.step

    async def synchronised(self, rank: Rank, step: int) -> None:
        """Ends a round that began in `step`, from 1. The Sample "sync gap" is the distance from the round before."""
        await rank.sample("sync gap", step - self._last)
        self._last = step


def pieces(x: Tensor, piece_kb: float) -> tuple[Tensor, ...]:
    """Splits `(n,)` into views of at most `piece_kb` kB each. 0: one view."""
    numel = int(piece_kb * 1e3) // x.element_size() if piece_kb else x.numel()
    return x.split(max(numel, 1))


async def ranks_mean(rank: Rank, bucket: Bucket, piece_kb: float = 0.0) -> tuple[Bucket, Bucket]:
    """Returns a copy of `bucket`'s parameters and their mean over all ranks, all-reduced piece by piece."""
    before = bucket.like(bucket.data.clone())
    mean = bucket.like(before.data / rank.size)
    for piece in pieces(mean.data, piece_kb):
        await rank.all_reduce(piece, "sum", f"shadow {bucket.name}")
    return before, mean
