"""Bagua's asynchronous model average: now and then the mean, in the background, added between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Rank
from workbench.strategies._average import average
from workbench.strategies._base import Strategy


class _State:
    """What one rank remembers: corrections that have come and await the step, and when the last averaging ended."""

    def __init__(self) -> None:
        self.memory = Memory()  # "correction"; "mean": the last one
        self.ended: float | None = None


@dataclass(frozen=True, kw_only=True)
class AsyncModelAverage(Strategy):
    """Each rank trains without ever waiting; every `every_ms` the ranks' parameters are averaged in the background.

        step:        params_i <- optimizer_i(params_i + correction_i, grad_i);   correction_i <- 0
        background:  before <- params_i + correction_i;   mean <- (1/p) sum_j before_j;   correction_i += mean - before

    An averaging is of the whole model as it was at one moment. Its correction waits until the gradient under way is
    computed, so that forward and backward see the same parameters, and is added, so the steps made meanwhile are kept:
    the sum over ranks of all parameters is moved by the optimizers alone. The time from one averaging's end to the
    next one's begin is told by rank 0's clock. Each costs 2 (p-1)/p of the model's bytes and none of a step's time.

    Bagua's warm-up, gradients averaged in every step, is DDP: begin with it and plan the change to this strategy.
    ShadowMA averages as often as the wire lets, bucket by bucket, and adds each correction at once.

    When to use it: ranks differ in speed, and the wire must not be busy all the time. Replicas drift apart for as
    long as `every_ms` says.

    Reference: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021,
    https://arxiv.org/abs/2107.01499
    """

    every_ms: float = knob(500.0, 0.0, 600000.0, unit="ms", doc="rest after an averaging; 0: the next at once")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def init(self, rank: Rank) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        await rank.forward()
        await rank.backward()
        _correct(await rank.params(), state)
        await rank.update()

    async def background(self, rank: Rank, state: _State) -> None:
        while await rank.again():
            if not await self._due(rank, state):
                continue
            buckets = await rank.params()
            snapshot = [bucket.data + state.memory.flat("correction", bucket) for bucket in buckets]
            for bucket, before in zip(buckets, snapshot, strict=True):
                mean = before / rank.size
                await rank.all_reduce(mean, "sum", f"average {bucket.name}")
                state.memory.flat("mean", bucket).copy_(mean)
                state.memory.flat("correction", bucket).add_(mean.sub_(before))
            state.ended = await rank.clock()

    async def _due(self, rank: Rank, state: _State) -> bool:
        """Has rank 0 rested for long enough?"""
        rested = state.ended is None or await rank.clock() - state.ended >= self.every_ms * 1e-3
        told = await rank.broadcast(torch.tensor([rested], dtype=torch.int32), 0, "due")
        return bool(told)

    async def known(self, rank: Rank, state: _State) -> list[Bucket] | None:
        if "mean" not in state.memory.slots:
            return None
        return [bucket.like(state.memory.flat("mean", bucket)) for bucket in await rank.params()]

    async def leave(self, rank: Rank, state: _State) -> None:
        _correct(await rank.params(), state)
        await average(rank)


def _correct(buckets: list[Bucket], state: _State) -> None:
    """Adds what averagings have said since the last step."""
    if "correction" in state.memory.slots:
        for bucket in buckets:
            correction = state.memory.flat("correction", bucket)
            bucket.data.add_(correction)
            correction.zero_()
