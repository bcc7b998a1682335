"""Shared by strategies that shard buckets: sums into shards, and shards into whole buckets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.rank import Bucket, Handle, Op, Rank, as_real, outlined, values_of


class Outstanding:
    """Limits the children under way in one lane: to start one more, it waits for the oldest.

    then: called with each child's result
    """

    def __init__(self, rank: Rank, most: int, lane: str = "comm",
                 then: Callable[[Any], Awaitable[None]] | None = None) -> None:  # fmt: skip
        self.rank, self.most, self.lane, self.then = rank, most, lane, then
        self._handles: deque[Handle] = deque()
        self._results: list[Any] = []

    async def start(self, child: Coroutine[Op, Any, Any], name: str) -> None:
        if len(self._handles) == self.most:
            try:
                await self._wait()
            except BaseException:
                child.close()  # it never starts
                raise
        self._handles.append(await self.rank.start(child, self.lane, name))

    async def all(self) -> list[Any]:
        """Returns the children's results in the order of their start."""
        while self._handles:
            await self._wait()
        return self._results

    async def _wait(self) -> None:
        self._results.append(await self.rank.wait(self._handles.popleft()))
        if self.then is not None:
            await self.then(self._results[-1])


class ShardGroups(NamedTuple):
    """One rank in three groups: all ranks, the ranks that shard a bucket, and the ranks with the same shard.

    replicas: None if all ranks share
    """

    rank: Rank
    sharers: Rank
    replicas: Rank | None = None


async def sum_into_shards(among: ShardGroups, outstanding: int, alone: bool,
                          leaves: Callable[[Bucket], Awaitable[None]] | None = None) -> list[Bucket]:  # fmt: skip
    """Makes one forward and backward. Returns this rank's shards of the summed gradients, clipped by `rank.clip`.

    outstanding: how many exchanges may be under way at a time
    alone:       whether a bucket's memory is freed once it is summed
    leaves:      called with each shard once it is summed, to move it away
    """
    rank = among.rank
    await rank.forward()
    sums = Outstanding(rank, outstanding, then=leaves)
    async for bucket in rank.backward(1.0 / rank.size):
        await sums.start(reduce_bucket(among, bucket, alone), bucket.name)
    shards: list[Bucket] = await sums.all()
    if rank.clip:
        await clip_shards(among.sharers, shards, rank.clip)
    return shards


async def reduce_bucket(among: ShardGroups, bucket: Bucket, alone: bool = False) -> Bucket:
    """Returns this rank's shard of the bucket's sum over the ranks, in the bucket's memory. `alone` frees that memory.

    Of p ranks g share a bucket. A rank sends (g-1)/g of the bucket among them. If g < p it also sends 2 (q-1)/q of a
    g-th. It sends it among the q = p/g ranks with the same shard. A compressor sends its bytes for the whole bucket,
    among all ranks.
    """
    rank, sharers, replicas = among
    shard = bucket.shard(sharers.index, sharers.size)
    if sharers.size == 1 or not rank.compressor.immediate:
        await rank.compressor.reduce(rank, bucket, rank.memory)
        if alone:
            shard.data = shard.data.clone()
    else:
        n = -(-bucket.data.numel() // sharers.size)
        total = await sharers.reduce_scatter(_filled(bucket.data, n * sharers.size), bucket.name)
        if replicas is not None:
            await replicas.all_reduce(total, "sum", bucket.name)
        if alone:
            shard.data = total[: shard.data.numel()]
        else:
            fill(shard.data, total[: shard.data.numel()])
    if alone:
        bucket.give_back(shard.data)
    return shard


async def gathered(rank: Rank, bucket: Bucket) -> None:
    """Gathers every rank's shard into `bucket`, which contains its own: sends (p-1)/p of the bucket."""
    if rank.size == 1:
        return
    shard = bucket.shard(rank.index, rank.size).data
    fill(bucket.data, await assembled(rank, shard, bucket))


async def assembled(rank: Rank, shard: Tensor, bucket: Bucket) -> Tensor:
    """Gathers all shards of `bucket` into new memory. Returns the parameters `(n,)`. Sends (p-1)/p of them."""
    length = -(-bucket.data.numel() // rank.size)
    rows = await rank.all_gather(_filled(shard, length), f"params {bucket.index}")
    return rows.view(-1)[: bucket.data.numel()]


async def clip_shards(rank: Rank, shards: list[Bucket], longest: float) -> None:
    """Scales the gradients down to `longest` if the norm over all ranks is larger; ranks all-reduce one number."""
    squares = torch.stack([_square(shard.data) for shard in shards]).sum().view(1)
    await rank.all_reduce(squares, "sum", "norm")
    if (total := float(values_of(squares, otherwise=-1.0))) < 0:  # sizes only: there is no norm
        return
    norm = math.sqrt(total)
    await rank.sample("grad_norm", norm)
    factor = longest / (norm + 1e-6)
    for shard in [] if factor >= 1.0 else shards:  # a norm that is no number makes all gradients so, as in torch
        shard.data.mul_(factor)


def _filled(x: Tensor, n: int) -> Tensor:
    return x if x.numel() == n else pad(x, (0, n - x.numel()))


@outlined(lambda into, x: None)
def fill(into: Tensor, x: Tensor) -> None:
    """Copies the values of `x` to `into`."""
    into.copy_(x)


@outlined(lambda x: x.new_empty((), dtype=torch.float64))
def _square(x: Tensor) -> Tensor:
    x = as_real(x)
    return (x if x.dtype == torch.float64 else x.float()).square().sum().double()
