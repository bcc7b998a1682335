"""Block momentum in the background."""

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
    """Ranks train without waiting, while a shadow on each pulls it towards a global model with momentum.

        step:        params_i <- optimizer_i(params_i, grad_i)
        background:  before <- params_i;   mean <- (1/p) sum_j before_j
                     delta <- eta delta + zeta (mean - W);   W <- W + delta;   params_i += alpha (W - before)

    W and delta are the same on all ranks. With eta = 0 and zeta = 1 W is the mean, and this is ShadowMA. With alpha = 1
    and no step during a round it is BMUF. The correction is added, so steps made during a round are kept. Bytes are
    ShadowMA's. eta acts once per round. The Sample "sync gap" is the number of steps in a round. It depends on the
    network.

    The share alpha of each addition to W returns to W with the next mean. So the momentum has more effect than in BMUF,
    because BMUF's blocks all begin at W. With large eta and alpha W oscillates about the mean. When the strategy is
    left, the result is the ranks' mean. delta is dropped.

    When to use it: as ShadowMA, with many ranks. Their mean moves only 1/p as far as each of them.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; adding the correction as in Bagua's asynchronous
    model average, Gan et al., VLDB 2021, https://arxiv.org/abs/2107.01499
    """

    alpha: float = knob(1.0, 0.0, 1.0, doc="alpha, the elastic weight: parameters become (1 - alpha) own + alpha W")
    eta: float = knob(0.5, 0.0, 0.99, doc="eta, the block momentum: share of delta that stays for the next round")
    zeta: float = knob(1.0, 0.0, 2.0, doc="zeta, the block learning rate: step of W towards the mean")

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
