"""Four shapes that every other varies, written against the verbs of a Rank; docs/shapes.md shows this very code.

They are examples and not shipped: each leaves out what its paper has beside the shape (tuning of sizes, memory
pools, uneven stages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.nn.functional import pad

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
class ZeRO3(Strategy):
    """Each rank keeps 1/p of the parameters and of the optimizer's state; a bucket is whole only while it is used.

    Gathered before its layers' forward and again before their backward, each time one bucket ahead; gradients are
    reduced to the rank that keeps their shard. Sends 3 (p-1)/p of the model's bytes per step, DDP 2 (p-1)/p.

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    https://arxiv.org/abs/1910.02054
    """

    exact: ClassVar[bool] = True
    in_flight: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def init(self, rank: Rank, params: list[Bucket]) -> list[Bucket]:
        return []  # the whole buckets, which say what is to be held

    async def step(self, rank: Rank, state: list[Bucket]) -> None:
        if not state:
            state += await rank.params()
            for bucket in state:
                await rank.hold(mine(rank, bucket))
        last = len(state) - 1
        coming = await self._fetch(rank, state, last)
        async for bucket in rank.forward():  # the last bucket's layers come first
            assert coming
            await rank.wait(coming)
            coming = await self._fetch(rank, state, bucket.index - 1)
            if bucket.index < last:
                await rank.hold(mine(rank, state[bucket.index + 1]))
        await rank.hold(mine(rank, state[0]))

        await rank.wait(await self._fetch(rank, state, 0))
        coming = await self._fetch(rank, state, 1)
        pending = []
        async for bucket in rank.backward(1 / rank.size):
            await rank.hold(mine(rank, state[bucket.index]))
            pending.append(await rank.start(reduced(rank, bucket), name=bucket.name))
            if coming:
                await rank.wait(coming)
            coming = await self._fetch(rank, state, bucket.index + 2)
        for bucket, handle in zip(state, pending, strict=True):
            await rank.wait(handle)
            await rank.update(mine(rank, bucket))

    async def leave(self, rank: Rank, state: list[Bucket]) -> None:
        for bucket in state:
            await gathered(rank, await rank.hold(bucket))
        state.clear()

    async def _fetch(self, rank: Rank, state: list[Bucket], index: int) -> Handle | None:
        if not 0 <= index < len(state):
            return None
        whole = await rank.hold(state[index])
        return await rank.start(gathered(rank, whole), lane="gather", name=whole.name)


def mine(rank: Rank, bucket: Bucket) -> Bucket:
    """The shard of `bucket` that this rank keeps."""
    return bucket.shard(rank.index, rank.size)


async def gathered(rank: Rank, bucket: Bucket) -> None:
    """Every rank's shard into `bucket`; the last shards are filled up, for all must be of one length."""
    n, shard = bucket.data.numel(), mine(rank, bucket).data
    rows = await rank.all_gather(pad(shard, (0, -(-n // rank.size) - len(shard))), bucket.name)
    bucket.data.copy_(rows.view(-1)[:n])


async def reduced(rank: Rank, bucket: Bucket) -> None:
    """The sum over ranks into this rank's shard of `bucket`."""
    n, shard = bucket.data.numel(), mine(rank, bucket).data
    sums = await rank.reduce_scatter(pad(bucket.data, (0, -n % rank.size)), bucket.name)
    shard.copy_(sums[: len(shard)])


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


