"""Model averaging in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._average import average
from workbench.strategies._shadow import Shadow, Shadowing, ranks_mean


@dataclass(frozen=True, kw_only=True)
class ShadowMA(Shadowing):
    """Ranks train without waiting, while a shadow on each averages the ranks' parameters.

        step:        params_i <- optimizer_i(params_i, grad_i)
        background:  before <- params_i;   mean <- (1/p) sum_j before_j;   params_i += alpha (mean - before)

    The correction is added, so steps made during an averaging are kept. With alpha = 1 only the optimizers move the sum
    of all ranks' parameters. Averagings follow each other as fast as the network allows, at most one per step. Each
    sends 2 (p-1)/p of the model's bytes and adds nothing to a step's time. The longer an averaging lasts, the further
    the replicas drift apart. The Sample "sync gap" is the number of steps from one averaging to the next.

    When to use it: the network is much slower than a step, and ranks differ in speed. LocalSGD averages as rarely but
    makes all ranks wait for it. AsyncServer loads one rank's network port.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; adding the correction as in Bagua's asynchronous
    model average, Gan et al., VLDB 2021, https://arxiv.org/abs/2107.01499
    """

    alpha: float = knob(1.0, 0.0, 1.0, doc="alpha, the elastic weight: parameters become (1 - alpha) own + alpha mean")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"
    own: ClassVar[dict[str, str]] = {"mean": "drop", "last": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> Shadow:
        return Shadow(rank, Memory())

    async def step(self, rank: Rank, state: Shadow) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()

    async def background(self, rank: Rank, state: Shadow) -> None:
        while step := await rank.again():
            for bucket in await self.replica(rank):
                before, mean = await ranks_mean(rank, bucket, self.piece_kb)
                state.memory.flat("mean", bucket).copy_(mean.data)
                bucket.data.add_(mean.data.sub_(before.data), alpha=self.alpha)
            await state.synchronised(rank, step)

    async def known(self, rank: Rank, state: Shadow) -> list[Bucket] | None:
        if "mean" not in state.memory.buffers:
            return None
        return [bucket.like(state.memory.flat("mean", bucket)) for bucket in await self.replica(rank)]

    async def leave(self, rank: Rank, state: Shadow) -> None:
        await average(rank)
