"""Bagua's asynchronous model average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._average import average, sum_by_messages
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class AsyncModelAverage(Strategy):
    """Ranks train without waiting, and average their parameters in the background every `every_ms`.

        step:        params_i <- optimizer_i(params_i + correction_i, grad_i);   correction_i <- 0
        background:  before <- params_i + correction_i;   mean <- (1/p) sum_j before_j;   correction_i += mean - before

    One averaging covers the whole model as it was at one moment. Its correction is applied after the gradient is
    computed, so forward and backward see the same parameters. The correction is added, so steps made during the
    averaging are kept. Only the optimizers move the sum of all ranks' parameters. The next averaging begins when every
    rank has waited `every_ms` by its own clock. Each averaging sends 2 (p-1)/p of the model's bytes and adds nothing to
    a step's time.

    Until step `warmup` of the run, ranks wait for each other and average gradients after backward. They send messages
    to neighbours on a ring, because asynchronous ranks do not meet for changes. This sends an all-reduce's bytes.
    ShadowMA averages bucket by bucket as often as the network allows, and adds each correction at once.

    When to use it: ranks differ in speed, and the network must not be busy all the time. Replicas drift apart for as
    long as `every_ms`.

    Reference: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021,
    https://arxiv.org/abs/2107.01499
    """

    every_ms: float = knob(500.0, 0.0, 600000.0, unit="ms", doc="pause between averagings; 0: none")
    warmup: int = knob(0, 0, 10**6, unit="steps", doc="average gradients instead before this step of the run")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"
    own: ClassVar[dict[str, str]] = {"correction": "sum", "mean": "drop"}

    def propagation_in(self, size: int, step: int) -> int:
        return int(step < self.warmup)

    def init(self, rank: Rank, params: list[Bucket]) -> Memory:
        return Memory()  # "correction": arrived, not yet applied; "mean": the last average

    async def step(self, rank: Rank, state: Memory) -> None:
        await rank.forward()
        if rank.step < self.warmup:
            await rank.backward(1.0 / rank.size)
            for bucket in await rank.grads():
                await sum_by_messages(rank, bucket)
        else:
            await rank.backward()
        _correct(await rank.params(), state)
        await rank.update()

    async def background(self, rank: Rank, state: Memory) -> None:
        rest, warm = 0.0, self.warmup > 0
        while await rank.again(rest):
            if warm:  # until rank 0 reports the end of the warm-up
                told = torch.tensor([rank.step < self.warmup], dtype=torch.int32)
                warm = bool(await rank.broadcast(told, 0, "warm-up"))
                continue
            buckets = await rank.params()
            snapshot = [bucket.data + state.flat("correction", bucket) for bucket in buckets]
            for bucket, before in zip(buckets, snapshot, strict=True):
                mean = before / rank.size
                await rank.all_reduce(mean, "sum", f"average {bucket.name}")
                state.flat("mean", bucket).copy_(mean)
                state.flat("correction", bucket).add_(mean.sub_(before))
            rest = self.every_ms * 1e-3

    async def known(self, rank: Rank, state: Memory) -> list[Bucket] | None:
        if "mean" not in state.buffers:
            return None
        return [bucket.like(state.flat("mean", bucket)) for bucket in await rank.params()]

    async def leave(self, rank: Rank, state: Memory) -> None:
        _correct(await rank.params(), state)
        await average(rank)


def _correct(buckets: list[Bucket], state: Memory) -> None:
    """Adds the corrections that arrived since the last step to the parameters."""
    if "correction" in state.buffers:
        for bucket in buckets:
            correction = state.flat("correction", bucket)
            bucket.data.add_(correction)
            correction.zero_()
