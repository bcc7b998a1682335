"""Three shapes that every other varies, written against the verbs of a Rank; docs/shapes.md shows this very code.

They are examples and not shipped: each leaves out what its paper has beside the shape (tuning of sizes, memory
pools, uneven stages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Handle, Rank
from workbench.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class ByteScheduler(Strategy):
    """DDP whose exchange goes on while the next step's forward runs, what forward needs first going first.

    The first layers are in the last bucket, so a bucket's index is its priority. The forward waits for each bucket
    just before its layers and updates it then. Parameters are one update behind until `leave`.

    Reference: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP
    2019, https://doi.org/10.1145/3341301.3359642
    """

    exact: ClassVar[bool] = True
    in_flight: ClassVar[bool] = True

    def init(self, rank: Rank, params: list[Bucket]) -> dict[int, Handle]:
        return {}  # bucket -> its exchange, under way across the step's end

    async def step(self, rank: Rank, state: dict[int, Handle]) -> None:
        async for bucket in rank.forward():
            await self._arrive(rank, state, bucket)
        async for bucket in rank.backward(1 / rank.size):
            exchange = rank.compressor.reduce(rank, bucket, rank.memory)
            state[bucket.index] = await rank.start(exchange, name=bucket.name, priority=bucket.index)

    async def leave(self, rank: Rank, state: dict[int, Handle]) -> None:
        for bucket in reversed(await rank.params()):
            await self._arrive(rank, state, bucket)

    async def _arrive(self, rank: Rank, state: dict[int, Handle], bucket: Bucket) -> None:
        if bucket.index in state:
            await rank.wait(state.pop(bucket.index))
            await rank.update(bucket)


@dataclass(frozen=True, kw_only=True)
class Wavelet(Strategy):
    """Two waves of batches on one rank: one's forward rises while the other's backward falls, sharing the memory.

    This is the strict form: both waves use the same parameters, so it equals DDP with `accumulate` = 2; the
    activations of tock take the place of those that tick's backward lets go.

    Reference: Wang et al., "Wavelet: Efficient DNN Training with Tick-Tock Scheduling", MLSys 2021,
    https://proceedings.mlsys.org/paper_files/paper/2021/hash/099268c3121d49937a67a052c51f865d-Abstract.html
    """

    exact: ClassVar[bool] = True

    async def step(self, rank: Rank, state: Any) -> None:
        share = 1 / (2 * rank.size)
        await rank.forward(micro=0)
        tock = rank.forward(micro=1)
        async for _ in rank.backward(share, micro=0):  # tick falls, bucket by bucket,
            await anext(tock)  # while tock rises to the next
        await tock
        pending = []
        async for bucket in rank.backward(share, micro=1):  # now with the gradients of both
            exchange = rank.compressor.reduce(rank, bucket, rank.memory)
            pending.append(await rank.start(exchange, name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        await rank.update()
