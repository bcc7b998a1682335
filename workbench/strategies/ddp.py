"""Synchronous data parallelism with bucketed, overlapped gradient averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class DDP(Strategy):
    """Averages the gradients of all ranks in every step, while backward is still running.

        params <- optimizer(params, (1/p) sum_i grad_i)

    Replicas stay identical. Each rank sends 2 (p-1)/p times the model's gradient bytes per step. Ranks average buckets
    in the same order as soon as they fill, so the exchange hides behind backward. With `accumulate` = k a rank adds the
    gradients of k batches before each exchange. So it exchanges 1/k as often.

    When to use it: always first, because it is exact. It suffers if the network is slow (see LocalSGD, compressors). It
    also suffers if one rank is slow, because all ranks wait for it.

    Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
    https://arxiv.org/abs/2006.15704
    """

    known_as: ClassVar[tuple[str, ...]] = ("DataParallel", "DistributedDataParallel", "AllReduce")
    accumulate: int = knob(1, 1, 64, unit="batches", doc="batches whose gradients are added before each exchange")

    alike: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    exchanges: ClassVar[str] = "gradients"

    def batches(self, size: int) -> int:
        return self.accumulate * size

    async def step(self, rank: Rank, state: Any) -> None:
        share = 1.0 / (self.accumulate * rank.size)
        # each rank's loss is scaled, so that the sum over ranks is the mean gradient without an extra pass
        for micro in range(self.accumulate - 1):
            await rank.forward(micro=micro)
            await rank.backward(share, micro=micro)
        await rank.forward(micro=self.accumulate - 1)
        pending = []
        async for bucket in rank.backward(share, micro=self.accumulate - 1):
            pending.append(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        await rank.update()
