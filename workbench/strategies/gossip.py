"""Gossip: every rank mixes its parameters with its neighbours' only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.knobs import knob
from workbench.ops import Rank
from workbench.strategies._base import Strategy
from workbench.strategies._graph import GRAPHS, hops, mixing_round, refused


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Every rank mixes its parameters with its neighbours' in each step, while it computes its gradient.

        params_i <- sum_j W_ij params_j                     W_ij > 0 for neighbours j of i and for i itself
        params_i <- optimizer_i(params_i, grad_i)           the gradient is that before the mixing

    W has Metropolis weights, 1 / (1 + the larger degree of i and j). Its rows and columns add up to 1, so the mean
    of all ranks moves as in DDP, and the ranks' disagreement shrinks in each round by its second largest |eigenvalue|:
    1/3 on a ring of 4, (1 + 2 cos(2 pi / p)) / 3 on a ring of p; on "exponential" with 2^n ranks nothing is left of
    it after n rounds. A rank sends the model's bytes once to each neighbour, so twice per step on a ring and once on
    "exponential"; it connects to its neighbours only and waits for nobody else.

    When to use it: latency is high, or ranks stumble now and then and not always the same one. In bytes only
    "exponential" beats the all-reduce of DDP. Evaluate the mean: one rank alone is off by the disagreement.

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
    https://arxiv.org/abs/1705.09056
    """

    graph: str = knob("ring", choices=GRAPHS, doc="who is whose neighbour; exponential: one other rank in each round")
    mix: float = knob(1.0, 0.0, 1.0, doc="how far each round goes towards the weighted mean of the neighbourhood")

    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def heard(self, size: int) -> int:
        return hops(self.graph, size)

    def refuses_size(self, size: int) -> str | None:
        return refused(self.graph, size)

    async def step(self, rank: Rank, state: Any) -> None:
        to, shares = mixing_round(self.graph, self.mix, rank.size, rank.index, rank.step)
        buckets = await rank.params()
        for bucket in buckets:
            for other in to:
                await rank.send(bucket.data, other, bucket.name)
        await rank.forward()
        await rank.backward()
        for bucket in buckets:
            mixed = bucket.data * shares[rank.index]
            for other, share in shares.items():
                if other != rank.index:
                    theirs, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), other, bucket.name)
                    mixed.add_(theirs, alpha=share)
            bucket.data.copy_(mixed)
        await rank.update()

    async def leave(self, rank: Rank, state: Any) -> None:
        for bucket in await rank.params():
            bucket.data.div_(rank.size)
            await rank.all_reduce(bucket.data, "sum", bucket.name)
