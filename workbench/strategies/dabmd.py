"""Distributed any-batch mirror descent (DABMD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from workbench.rank import Bucket, Rank, StrategyError, values_of
from workbench.settings import knob
from workbench.strategies._average import average
from workbench.strategies._base import Strategy
from workbench.strategies._graph import GRAPHS, Round, hops, mixing_round, refused

MIRROR_MAPS = ("euclidean", "entropic")
STEP_ORDERS = ("step, mix", "mix, step")
SLACK_SECONDS = 1e-6  # seconds: a batch that ends exactly at the deadline counts


@dataclass(frozen=True, kw_only=True)
class DABMD(Strategy):
    """Distributed any-batch mirror descent: ranks compute as many batches as they can in rounds of fixed time.

        g_i <- mean gradient of the b_i batches that rank i has finished within `window`
        y_i <- argmin_x  <g_i, x> + D(x, x_i) / lr
        x_i <- sum_j W_ij b_j y_j / sum_j W_ij b_j,   b_i <- sum_j W_ij b_j       `rounds` times

    D is the Bregman divergence of the `mirror` map. "euclidean": D = |x - x_i|^2 / 2, so y_i is a step of plain SGD.
    Another optimizer makes its own step instead. "entropic": D = sum x log(x / x_i), and each parameter keeps its sum
    s. This is exponentiated gradient on a simplex of size s,

        y_i = s x_i exp(-lr g_i) / sum(x_i exp(-lr g_i))

    "entropic" needs parameters above zero and keeps them there. It does not use the run's optimizer. `decay` multiplies
    the gradients of round t by t^-a, which a scale-free optimizer such as Adam ignores. The regret bounds of mirror
    descent need a = 1/2.

    `order` "step, mix" is the algorithm above. With "mix, step" ranks mix x_i and then step from there with the
    gradient at the old x_i. In the Euclidean case this is x_i <- sum_j W_ij x_j - lr g_i, as in D-PSGD. Ranks then
    differ after a round by their last gradients, even on "complete".

    W has Metropolis weights on any graph of Gossip, even if it changes. With weights b a rank that has seen few
    examples counts for little. On "complete" or with many `rounds` the result is the step with the mean gradient of all
    ranks' examples. Without `weighted` it is sum_j W_ij y_j. This keeps the ranks' mean, and noisy gradients of slow
    ranks count in full.

    A rank begins no batch that would end after the deadline if it took as long as the batch before. It always begins
    the first batch. If a batch takes longer than `window`, the rank delays its neighbours. Then use smaller batches.
    The Sample "batches" is b_i. On real clocks it differs from run to run. `rounds` times per step a rank sends each
    neighbour the model's bytes and 8 more. It computes nothing at the same time. The learning rate is per round, for
    b_i batches.

    When to use it: ranks differ in speed, permanently or at times, and data is unlimited. Unlike DDP no rank waits for
    the slowest, and unlike AsyncServer no gradient is stale.

    This follows the paper's abstract: fixed computing time, primal averaging once or several times, and time-varying
    graphs. The paper's order is not known here, so both exist. The weights b are those of Anytime Minibatch (Ferdinand
    et al., ICLR 2019, https://arxiv.org/abs/2006.05752).

    Reference: Eshraghi and Liang, "Distributed Online Optimization over a Heterogeneous Network with Any-Batch Mirror
    Descent", ICML 2020, https://icml.cc/virtual/2020/poster/6727
    """

    window: float = knob(50.0, 0.1, 60_000.0, unit="ms", log=True, doc="T: computing time of every rank in a round")
    most: int = knob(64, 1, 4096, unit="batches", log=True, doc="largest number of batches of a rank in a round")
    mirror: str = knob(
        MIRROR_MAPS[0], choices=MIRROR_MAPS, doc="the mirror map: plain steps, or multiplicative ones on a simplex"
    )
    graph: str = knob("ring", choices=GRAPHS, doc="graph of neighbours; exponential: one other rank in each round")
    edges: str = knob("", doc="a graph of your own instead, '0-1 1-2 2-0', or rows of weights, '0.5 0.5; 0.5 0.5'")
    rounds: int = knob(1, 1, 64, log=True, doc="K: mixings with the neighbours per step")
    weighted: bool = knob(True, doc="weight neighbours by their number of batches")
    order: str = knob(
        STEP_ORDERS[0], choices=STEP_ORDERS, doc="what comes first in a round, the rank's step or the mixing"
    )
    decay: float = knob(0.0, 0.0, 1.0, doc="a: the step of round t is lr / t^a; 0: lr")

    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    exchanges: ClassVar[str] = "parameters"
    sees_all: ClassVar[bool] = True  # ranks of one replica would stop at different deadlines

    def propagation(self, size: int) -> int:
        return hops(self.edges or self.graph, size)

    def refuses_size(self, size: int) -> str | None:
        return refused(self.edges or self.graph, size)

    def receivers(self, size: int, index: int, number: int = 0) -> tuple[int, ...]:
        """Returns the ranks that rank `index` of `size` sends to in round `number`."""
        return mixing_round(self.edges or self.graph, 1.0, size, index, number).to

    def refuses_values(self, params: Mapping[str, torch.Tensor]) -> str | None:
        if self.mirror == "euclidean":
            return None
        low = {name: float(values_of(x, 1.0).min()) for name, x in params.items() if x.numel()}
        worst = min(low, key=low.__getitem__, default=None)
        if worst is None or low[worst] > 0:
            return None
        return (
            f"mirror='entropic' multiplies parameters, which must all be above 0, and {worst} has {low[worst]:.3g}; "
            f"take mirror='euclidean', or a model that begins above 0"
        )

    def init(self, rank: Rank, params: list[Bucket]) -> None:
        if reason := self.refuses_values({p.name: b.data[p.start : p.stop] for b in params for p in b.parts}):
            raise StrategyError(reason)

    async def step(self, rank: Rank, state: Any) -> None:
        done = await self._compute(rank)
        for bucket in await rank.grads():
            bucket.data.div_(done * (rank.step + 1) ** self.decay)
        await rank.sample("batches", done)
        weight = float(done if self.weighted else 1)
        if self.order == STEP_ORDERS[0]:
            await self._descend(rank)
            await self._agree(rank, weight)
        else:
            await self._agree(rank, weight)
            await self._descend(rank)

    async def _descend(self, rank: Rank) -> None:
        if self.mirror == "entropic":
            await rank.update(by=partial(_multiply, await rank.params(), await rank.grads(), rank.lr))
        else:
            await rank.update()

    async def _agree(self, rank: Rank, weight: float) -> None:
        """Mixes `rounds` times with the neighbours; `weight` is this rank's weight."""
        for k in range(self.rounds):
            number = rank.step * self.rounds + k
            part = mixing_round(self.edges or self.graph, 1.0, rank.size, rank.index, number)
            weight = await _mix(rank, await rank.params(), part, weight)

    async def leave(self, rank: Rank, state: Any) -> None:
        await average(rank)

    async def _compute(self, rank: Rank) -> int:
        """Adds up gradients until the deadline and returns the number of batches."""
        now = await rank.clock()
        deadline, lasted, done = now + self.window * 1e-3 + SLACK_SECONDS, 0.0, 0
        while not done or (done < self.most and now + lasted <= deadline):
            await rank.forward()
            await rank.backward()
            began, now = now, await rank.clock()
            lasted, done = now - began, done + 1
        return done


def _multiply(params: list[Bucket], grads: list[Bucket], lr: float) -> None:
    """Makes the entropic step of each parameter in logarithms, against overflow. Results stay above 0."""
    for bucket, grad in zip(params, grads, strict=True):
        for part in bucket.parts:
            x, g = bucket.data[part.start : part.stop], grad.data[part.start : part.stop]
            wide = torch.promote_types(x.dtype, torch.float32)
            moved = torch.softmax(x.to(wide).log() - lr * g.to(wide), 0).mul_(x.sum(dtype=wide))
            x.copy_(moved).clamp_min_(torch.finfo(x.dtype).tiny)


async def _mix(rank: Rank, buckets: list[Bucket], part: Round, weight: float) -> float:
    """Sets the parameters to the neighbourhood's weighted mean, added in rank order. Returns the total weight."""
    own = torch.tensor([weight], dtype=torch.float64)
    for other in part.to:
        await rank.send(own, other, "weight")
        for bucket in buckets:
            await rank.send(bucket.data, other, bucket.name)
    weights = {}
    for other, share in part.shares.items():
        theirs = own
        if other != rank.index:
            theirs, _ = await rank.recv(torch.empty_like(own), other, "weight")
        weights[other] = share * float(values_of(theirs, weight))
    total = sum(weights.values())
    for bucket in buckets:
        mixed: Any = None
        for other, mine in weights.items():
            theirs = bucket.data
            if other != rank.index:
                theirs, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), other, bucket.name)
            mixed = theirs * (mine / total) if mixed is None else mixed.add_(theirs, alpha=mine / total)
        bucket.data.copy_(mixed)
    return total
