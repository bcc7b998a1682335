"""ZeRO stage 3: ranks also shard the parameters."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor

from workbench.rank import Bucket, Handle, Op, Rank
from workbench.settings import knob
from workbench.strategies._sharded import ShardGroups, assembled, sum_into_shards
from workbench.strategies.zero_2 import ZeRO2


@dataclass(frozen=True, kw_only=True)
class ZeRO3(ZeRO2):
    """ZeRO2 that also shards the parameters: ranks gather a bucket before its layers are computed.

        before forward or backward reads a bucket:   params <- all ranks' params_r       all-gather, `prefetch` ahead
        once it is read no more:                     params_r <- rank r's shard of it
        g_r <- sum_i grad_i, of rank r's shard                         reduce-scatter, while backward runs
        params_r, state_r <- optimizer(params_r, state_r, g_r)

    Of Psi parameters a rank holds (2 + 2 + K) Psi / p bytes in 16 bits ((4 + 4 + K) Psi / p in fp32). It also holds the
    buckets that are whole. These are the bucket that it reads, `prefetch` more, and buckets of weights that the same
    pass uses again. It sends 3 (p-1)/p of the model's bytes per step: parameters for the forward, parameters for the
    backward and gradients. This is 1.5 times as much as DDP. The last layers stay whole from the forward to the
    backward. Backward does not read layers whose input needs no gradient. The shards together are bit-identical to one
    process's result. Buckets of the size of a layer work best.

    A dry step computes nothing and finds the order in which the model reads its parameters. If a model's control flow
    depends on values, its first step shows the order and keeps all buckets whole. Every rank computes an evaluation,
    with all-gathers in the lane "measuring".

    When to use it: parameters also need too much memory. Every rank must read them in the same order. Ranks check this
    in the first steps and then in one of 32. When the size of buckets changes, shards move bucket by bucket. So no rank
    holds the whole model. A model that no rank can hold does not work yet, because each rank makes it whole at the
    start. Frozen parameters stay whole. FSDP (`fully_shard`) is the same with layers instead of buckets.

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    https://arxiv.org/abs/1910.02054, section 5.3; Zhao et al., "PyTorch FSDP", VLDB 2023,
    https://arxiv.org/abs/2304.11277
    """

    known_as: ClassVar[tuple[str, ...]] = ("FSDP", "FSDP2", "FullyShardedDataParallel")
    prefetch: int = knob(1, 0, 64, unit="buckets", doc="parameters gathered in advance: less waiting, more memory")

    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state", "gradients", "parameters"})
    own: ClassVar[dict[str, str]] = {"by bucket": "drop", "seconds": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> dict[int, Handle]:
        return {}  # bucket -> its all-gather under way

    def among(self, rank: Rank) -> ShardGroups:
        """Returns the ranks that shard a bucket together: all ranks."""
        return ShardGroups(rank, rank)

    async def step(self, rank: Rank, state: Any) -> None:
        for shard in await sum_into_shards(self.among(rank), self.outstanding, alone=True):
            await rank.update(shard)

    async def gathering(self, rank: Rank, state: Any, bucket: Bucket) -> Coroutine[Op, Any, Tensor]:
        """Returns a coroutine that gathers all of `bucket` and returns its parameters `(n,)`."""
        sharers = self.among(rank).sharers
        shard = await rank.hold(bucket.shard(sharers.index, sharers.size))
        return assembled(sharers, shard.data, bucket)

    async def unshard(self, rank: Rank, state: dict[int, Handle], bucket: Bucket, following: Iterator[Bucket]) -> None:
        for one in [bucket, *islice(following, self.prefetch)]:
            if one.index not in state:
                child = await self.gathering(rank, state, one)
                state[one.index] = await rank.start(child, name=f"params {one.index}")
        await rank.hold(bucket.like(await rank.wait(state.pop(bucket.index))))

    async def reshard(self, rank: Rank, state: dict[int, Handle], bucket: Bucket) -> None:
        if bucket.index in state:  # it was gathered ahead and not read
            await rank.wait(state.pop(bucket.index))
        sharers = self.among(rank).sharers
        await rank.hold(bucket.shard(sharers.index, sharers.size))
