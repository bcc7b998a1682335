"""Stochastic gradient push: gossip on one-way links."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._graph import PUSHES, push_hops, push_refused, push_round


class _Sent(NamedTuple):
    """A round of messages that was sent in `step` and is not received yet."""

    step: int
    sources: tuple[int, ...]
    buckets: list[Bucket]  # as they were cut in that step


class _State:
    """State of one rank: its push-sum weight, and the rounds that it has not received."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.owed: deque[_Sent] = deque()
        self.memory = Memory()  # "arrived": received, not yet added to the parameters


@dataclass(frozen=True, kw_only=True)
class StochasticGradientPush(Strategy):
    """Ranks give away shares of their parameters and add the shares that they receive; links may go one way.

        x_i <- optimizer_i(x_i, grad_i(z_i))                             the gradient is that at z_i
        x_i <- sum_j P_ij x_j;   w_i <- sum_j P_ij w_j                   P_ij > 0 where j sends to i, and for i itself
        z_i <- x_i / w_i                                                 w_i is 1 at first

    Only the columns of P must add up to 1. A rank keeps 1 / (1 + receivers) and gives as much to each receiver. So the
    sums of all x_i and of all w_i stay constant. But x_i may drift to a multiple of the mean, and z_i goes to the mean.
    If each rank has as many receivers as senders, w_i stays 1 and this is gossip after the update. On "chain" and on
    most graphs of your own w_i changes. The model's parameters are z_i except during the update.

    A rank sends each receiver the model's bytes and 8 bytes for the weight. On "ring" and "exponential" that is once
    per round. On "exponential" the receiver is `1, 2, 4, ...` ranks ahead in turn. With `overlap` = 0 it waits for this
    step's messages. With more it receives a message `overlap` steps after it was sent, so exchanges hide behind the
    next steps. Messages under way are missing from both x_i and w_i.

    When to use it: as Gossip, if links go one way or ranks have different numbers of neighbours. It loses to DDP if
    only bandwidth counts. When the strategy is left, the result is sum x_i / sum w_i. This is not the mean of the z_i.

    Reference: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
    https://arxiv.org/abs/1811.10792
    """

    graph: str = knob("exponential", choices=PUSHES, doc="graph of messages; exponential: one other rank in each round")
    edges: str = knob("", doc="a graph of your own instead, '0>1 1>2 2>0', or rows of weights, '0.5 0.5; 0.5 0.5'")
    every: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two rounds of messages")
    overlap: int = knob(0, 0, 16, unit="steps", doc="steps from sending a message to using it")

    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"
    own: ClassVar[dict[str, str]] = {"arrived": "sum", "weight": "sum", "owed": "sum"}

    def propagation(self, size: int) -> int:
        late = self.overlap // self.every  # in rounds
        return (push_hops(self.edges or self.graph, size, late) - late) * self.every + self.overlap

    def refuses_size(self, size: int) -> str | None:
        return push_refused(self.edges or self.graph, size)

    def receivers(self, size: int, index: int, number: int = 0) -> tuple[int, ...]:
        """Returns the ranks that rank `index` of `size` sends to in round `number`."""
        return tuple(push_round(self.edges or self.graph, size, index, number).gives)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        await rank.forward()
        await rank.backward()
        buckets = await rank.params()
        _multiply(buckets, state.weight)
        await rank.update()
        if rank.step % self.every == 0:
            await self._give(rank, state, buckets)
        while state.owed and state.owed[0].step + self.overlap <= rank.step:
            await _take(rank, state, buckets)
        _multiply(buckets, 1 / state.weight)

    async def _give(self, rank: Rank, state: _State, buckets: list[Bucket]) -> None:
        part = push_round(self.edges or self.graph, rank.size, rank.index, rank.step // self.every)
        for other, share in part.gives.items():
            for bucket in buckets:
                await rank.send(bucket.data * share, other, bucket.name)
            await rank.send(torch.tensor([share * state.weight], dtype=torch.float64), other, "weight")
        _multiply(buckets, part.keeps)
        state.weight *= part.keeps
        state.owed.append(_Sent(rank.step, part.sources, buckets))

    async def leave(self, rank: Rank, state: _State) -> None:
        buckets = await rank.params()
        _multiply(buckets, state.weight)
        while state.owed:
            await _take(rank, state, buckets)
        weight = await rank.all_reduce(torch.tensor([state.weight], dtype=torch.float64), "sum", "weight")
        for bucket in buckets:
            bucket.data.div_(float(weight))
            await rank.all_reduce(bucket.data, "sum", bucket.name)
        state.weight = 1.0


async def _take(rank: Rank, state: _State, buckets: list[Bucket]) -> None:
    """Receives the oldest round's messages and adds them to the parameters and the weight."""
    sent = state.owed.popleft()
    for source in sent.sources:
        for bucket in sent.buckets:
            theirs, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), source, bucket.name)
            state.memory.flat("arrived", bucket).add_(theirs)
        weight, _ = await rank.recv(torch.zeros(1, dtype=torch.float64), source, "weight")
        state.weight += float(weight)
    for bucket in buckets:
        arrived = state.memory.flat("arrived", bucket)
        bucket.data.add_(arrived)
        arrived.zero_()


def _multiply(buckets: list[Bucket], by: float) -> None:
    if by != 1.0:
        for bucket in buckets:
            bucket.data.mul_(by)
