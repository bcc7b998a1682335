"""What strategies share whose ranks each keep a shard of every bucket: sums into shards, and shards into the whole."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Coroutine
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.rank import Bucket, Handle, Op, Rank, outlined, values_of


class Outstanding:
    """Children of which only so many are under way at a time: one more waits for the oldest."""

    def __init__(self, rank: Rank, most: int) -> None:
        self.rank, self.most = rank, most
        self._handles: deque[Handle] = deque()
        self._results: list[Any] = []

    async def start(self, child: Coroutine[Op, Any, Any], name: str) -> None:
        if len(self._handles) == self.most:
            self._results.append(await self.rank.wait(self._handles.popleft()))
        self._handles.append(await self.rank.start(child, name=name))

    async def all(self) -> list[Any]:
        """What the children returned, in the order of their start."""
        while self._handles:
            self._results.append(await self.rank.wait(self._handles.popleft()))
        return self._results


async def reduced(rank: Rank, bucket: Bucket, alone: bool = False) -> Bucket:
    """This rank's shard of the bucket's sum over the ranks; in the bucket's own memory, or `alone`, and that is free.

    Sends (p-1)/p of the bucket. A compressor sends what it does for the whole bucket, of which the shard is taken.
    """
    shard = bucket.shard(rank.index, rank.size)
    if rank.size == 1 or not rank.compressor.immediate:
        await rank.compressor.reduce(rank, bucket, rank.memory)
        if alone:
            shard.data = shard.data.clone()
    else:
        n = -(-bucket.data.numel() // rank.size)
        total = await rank.reduce_scatter(pad(bucket.data, (0, n * rank.size - bucket.data.numel())), bucket.name)
        if alone:
            shard.data = total[: shard.data.numel()]
        else:
            _fill(shard.data, total[: shard.data.numel()])
    if alone:
        bucket.give_back(shard.data)
    return shard


async def gathered(rank: Rank, bucket: Bucket) -> None:
    """Every rank's shard into `bucket`, whose own shard is there: sends (p-1)/p of the bucket."""
    if rank.size == 1:
        return
    n, shard = -(-bucket.data.numel() // rank.size), bucket.shard(rank.index, rank.size).data
    rows = await rank.all_gather(pad(shard, (0, n - shard.numel())), f"params {bucket.index}")
    _fill(bucket.data, rows.view(-1)[: bucket.data.numel()])


async def shortened(rank: Rank, shards: list[Bucket], longest: float) -> None:
    """Scales these gradients down to `longest` where all ranks' together are longer: one number is added up."""
    squares = torch.stack([_square(shard.data) for shard in shards]).sum().view(1)
    await rank.all_reduce(squares, "sum", "norm")
    if (total := float(values_of(squares, otherwise=-1.0))) < 0:  # sizes only: there is no norm
        return
    norm = math.sqrt(total)
    await rank.sample("grad_norm", norm)
    factor = longest / (norm + 1e-6)
    for shard in [] if factor >= 1.0 else shards:  # one that is no number makes all gradients so, as in torch
        shard.data.mul_(factor)


@outlined(lambda into, x: None)
def _fill(into: Tensor, x: Tensor) -> None:
    into.copy_(x)


@outlined(lambda x: x.new_empty((), dtype=torch.float64))
def _square(x: Tensor) -> Tensor:
    return (x if x.dtype == torch.float64 else x.float()).square().sum().double()
