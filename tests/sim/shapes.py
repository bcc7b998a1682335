"""Three shapes that every other varies, written against the verbs of a Rank; docs/shapes.md shows this very code.

They are examples and not shipped: each leaves out what its paper has beside the shape (tuning of sizes, memory
pools, uneven stages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Handle, Rank
from workbench.settings import knob
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


@dataclass(frozen=True, kw_only=True)
class OneFOneB(Strategy):
    """A pipeline of stages; after a rank's warm-up one backward follows one forward, and all flush before the update.

    Stage i has at most min(m, p - i) micro-batches in flight. Bubble: (p-1)/(m+p-1) of the time.

    Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021, https://arxiv.org/abs/2104.04473
    """

    micros: int = knob(8, 1, 256, unit="micro-batches", doc="m: batches that follow each other in a step")

    lockstep: ClassVar[bool] = False
    staged: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def propagation(self, size: int) -> int:
        return 1  # the word goes down the stages with a step's activations

    async def step(self, rank: Rank, state: Any) -> None:
        ahead = min(self.micros, rank.size - rank.index)
        for micro in range(ahead):
            await self._forward(rank, micro)
        for micro in range(self.micros):
            await self._backward(rank, micro)
            if micro + ahead < self.micros:
                await self._forward(rank, micro + ahead)
        await rank.update()

    async def _forward(self, rank: Rank, micro: int) -> None:
        x = None
        if rank.index > 0:
            x, _ = await rank.recv(None, rank.index - 1, "activation")
        y = await rank.forward(x, micro)
        if rank.index < rank.size - 1:
            await rank.send(y, rank.index + 1, "activation")

    async def _backward(self, rank: Rank, micro: int) -> None:
        grad: Any = 1 / self.micros
        if rank.index < rank.size - 1:
            grad, _ = await rank.recv(None, rank.index + 1, "gradient")
        grad = await rank.backward(grad, micro)
        if rank.index > 0:
            await rank.send(grad, rank.index - 1, "gradient")


