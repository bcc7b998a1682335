"""Gossip: ranks mix parameters with their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._average import average
from workbench.strategies._base import Strategy
from workbench.strategies._graph import GRAPHS, Round, hops, mixing_round, refused

STEP_ORDERS = ("combine-then-adapt", "adapt-then-combine")


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Mixes each rank's parameters with its neighbours' every `every` steps, while the gradient is computed.

        params_i <- sum_j W_ij params_j                     W_ij > 0 for neighbours j of i and for i itself
        params_i <- optimizer_i(params_i, grad_i)           the gradient is that before the mixing

    W has Metropolis weights, 1 / (1 + the larger degree of i and j). Its rows and columns add up to 1, so the mean of
    all ranks moves as in DDP. In each round the ranks' disagreement shrinks by W's second largest |eigenvalue|. This is
    1/3 on a ring of 4 and (1 + 2 cos(2 pi / p)) / 3 on a ring of p. On "exponential" a rank sends to one rank and
    receives from another. On "butterfly" both are the same rank. On both graphs the disagreement of 2^n ranks is gone
    after n rounds. "shift_one" is Bagua's pairing for any even number of ranks.

    A rank connects to its neighbours only and sends each neighbour the model's bytes. That is twice per round on a ring
    and once on "exponential" and in pairs. In the order above the exchange hides behind forward and backward.
    "adapt-then-combine" updates first and mixes the result. It hides nothing, but the ranks end a step closer together.
    On "complete" with plain SGD it equals DDP.

    When to use it: latency is high, or different ranks are slow at different times. Only the graphs with one partner
    send fewer bytes than DDP's all-reduce. Evaluate the mean, because a single rank differs from it.

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
    https://arxiv.org/abs/1705.09056; "shift_one": Gan et al., "BAGUA: Scaling up Distributed Learning with System
    Relaxations", VLDB 2021, https://arxiv.org/abs/2107.01499
    """

    graph: str = knob("ring", choices=GRAPHS, doc="graph of neighbours; exponential: one other rank in each round")
    edges: str = knob("", doc="a graph of your own instead, '0-1 1-2 2-0', or rows of weights, '0.5 0.5; 0.5 0.5'")
    mix: float = knob(1.0, 0.0, 1.0, doc="mixing rate: from the rank's own value (0) to the neighbourhood's mean (1)")
    order: str = knob(
        STEP_ORDERS[0], choices=STEP_ORDERS, doc="mix before the update, during the gradient, or after the update"
    )
    every: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two rounds of mixing")

    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def propagation(self, size: int) -> int:
        return hops(self.edges or self.graph, size) * self.every

    def refuses_size(self, size: int) -> str | None:
        return refused(self.edges or self.graph, size)

    def receivers(self, size: int, index: int, number: int = 0) -> tuple[int, ...]:
        """Returns the ranks that rank `index` of `size` sends to in round `number`."""
        return mixing_round(self.edges or self.graph, self.mix, size, index, number).to

    async def step(self, rank: Rank, state: Any) -> None:
        number, waits = divmod(rank.step, self.every)
        part = mixing_round(self.edges or self.graph, self.mix, rank.size, rank.index, number)
        buckets = [] if waits else await rank.params()
        if self.order == "combine-then-adapt":
            await _tell(rank, buckets, part)
            await rank.forward()
            await rank.backward()
            await _mix(rank, buckets, part)
            await rank.update()
        else:
            await rank.forward()
            await rank.backward()
            await rank.update()
            await _tell(rank, buckets, part)
            await _mix(rank, buckets, part)

    async def leave(self, rank: Rank, state: Any) -> None:
        await average(rank)


async def _tell(rank: Rank, buckets: list[Bucket], part: Round) -> None:
    for bucket in buckets:
        for other in part.to:
            await rank.send(bucket.data, other, bucket.name)


async def _mix(rank: Rank, buckets: list[Bucket], part: Round) -> None:
    """Adds the shares in rank order, so ranks with the same shares and values get bit-identical results."""
    for bucket in buckets:
        mixed: Any = None
        for other, share in part.shares.items():
            theirs = bucket.data
            if other != rank.index:
                theirs, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), other, bucket.name)
            mixed = theirs * share if mixed is None else mixed.add_(theirs, alpha=share)
        bucket.data.copy_(mixed)
