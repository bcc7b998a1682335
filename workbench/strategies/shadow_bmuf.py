"""Block momentum in the background: a shadow filters the ranks' means, and training never waits for the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._average import average
from workbench.strategies._copies import copies
from workbench.strategies._shadow import Shadow, Shadowing, ranks_mean


@dataclass(frozen=True, kw_only=True)
class ShadowBMUF(Shadowing):
    """Each rank trains without ever waiting, while a shadow beside it pulls it to a global model with a momentum.

        step:        params_i <- optimizer_i(params_i, grad_i)
        background:  before <- params_i;   mean <- (1/p) sum_j before_j
                     delta <- eta delta + zeta (mean - W);   W <- W + delta;   params_i += alpha (W - before)

    W and delta are the same on all ranks. With eta = 0 and zeta = 1 W is the mean, and this is ShadowMA; with alpha = 1
    and no step made during a round it is BMUF. As in ShadowMA the correction is added, so the steps made during a round
    are kept; and each round costs 2 (p-1)/p of the model's bytes and none of a step's time. eta counts rounds, and how
    many steps a round lasts is up to the wire: the Sample "sync gap" says so.

    What is added to W in one round comes back to it with the mean in the next, alpha of it. So the momentum counts for
    more here than in BMUF, whose blocks all begin at W: where eta and alpha are large W swings about the mean.

    When it is left the ranks' mean goes on, and delta is forgotten.

    When to use it: as ShadowMA, with many ranks, whose mean moves only a p-th of the way that each of them does.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; adding the correction as in Bagua's asynchronous
    model average, Gan et al., VLDB 2021, https://arxiv.org/abs/2107.01499
    """

    alpha: float = knob(1.0, 0.0, 1.0, doc="alpha, the elastic weight: parameters become (1 - alpha) own + alpha W")
    eta: float = knob(0.5, 0.0, 0.99, doc="eta, the block momentum: how much of delta is left in the next round")
    zeta: float = knob(1.0, 0.0, 2.0, doc="zeta, the block learning rate: how far W goes to the mean")

    moves_frozen: ClassVar[bool] = True
    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    exchanges: ClassVar[str] = "parameters"
    own: ClassVar[dict[str, str]] = {"W": "drop", "delta": "drop", "last": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> Shadow:
        return Shadow(rank, copies(params, "W"))

    async def step(self, rank: Rank, state: Shadow) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()

    async def background(self, rank: Rank, state: Shadow) -> None:
        while step := await rank.again():
            for bucket in await self.replica(rank):
                before, mean = await ranks_mean(rank, bucket, self.piece_kb)
                W, delta = state.memory.flat("W", bucket), state.memory.flat("delta", bucket)
                delta.mul_(self.eta).add_(mean.data.sub_(W), alpha=self.zeta)
                W.add_(delta)
                bucket.data.add_(W - before.data, alpha=self.alpha)
            await state.synchronised(rank, step)

    async def known(self, rank: Rank, state: Shadow) -> list[Bucket]:
        return [bucket.like(state.memory.flat("W", bucket)) for bucket in await self.replica(rank)]

    async def leave(self, rank: Rank, state: Shadow) -> None:
        await average(rank)
