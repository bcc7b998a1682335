"""ZeRO stage 3: parameters, gradients and optimizer state are shared out; a bucket is whole only while it is read."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor

from workbench.rank import Bucket, Handle, Op, Rank
from workbench.settings import knob
from workbench.strategies._sharded import Among, assembled, summed
from workbench.strategies.zero_2 import ZeRO2


@dataclass(frozen=True, kw_only=True)
class ZeRO3(ZeRO2):
    """ZeRO2, and each rank keeps its shard of the parameters, too: a bucket is gathered before its layers are computed.

        before forward or backward reads a bucket:   params <- all ranks' params_r       all-gather, `prefetch` ahead
        once it is read no more:                     params_r <- rank r's shard of it
        g_r <- sum_i grad_i, of rank r's shard                         reduce-scatter, while backward runs
        params_r, state_r <- optimizer(params_r, state_r, g_r)

    Of Psi parameters a rank holds (2 + 2 + K) Psi / p bytes in 16 bits ((4 + 4 + K) Psi / p in fp32), and the buckets
    that are whole at the time: the one that is read, `prefetch` more, and those of weights that are used again in the
    same pass. It sends 3 (p-1)/p of the model's bytes per step, 1.5 times as much as DDP: parameters for the forward,
    again for the backward, and gradients; but the last layers stay from the forward to the backward, and those whose
    input wants no gradient are not read there. Its shards make together what one process would, to the bit. Buckets of
    the size of a layer do best.

    In which order the model reads its parameters is found beforehand, in a step that computes nothing; a model that
    looks at values shows it in its first step, in which everything is whole. An evaluation goes through the shards,
    too: every rank computes it. What is gathered then is in the lane "measuring".

    When to use it: parameters are in the way, too. Every rank must read them in the same order, which is looked at in
    the first steps and then in one of 32. When the size of buckets changes, shards are dealt out anew bucket by bucket,
    and nobody holds the model for it. Not yet for a model that no rank can hold: each makes it whole at the start;
    frozen parameters stay whole. FSDP (`fully_shard`) is the same with layers in the place of buckets.

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    https://arxiv.org/abs/1910.02054, section 5.3; Zhao et al., "PyTorch FSDP", VLDB 2023,
    https://arxiv.org/abs/2304.11277
    """

    known_as: ClassVar[tuple[str, ...]] = ("FSDP", "FSDP2", "FullyShardedDataParallel")
    prefetch: int = knob(1, 0, 64, unit="buckets", doc="gathered ahead of what is read: less waiting, more memory")

    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state", "gradients", "parameters"})
    own: ClassVar[dict[str, str]] = {"by bucket": "drop", "seconds": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> dict[int, Handle]:
        return {}  # bucket -> its gathering, under way

    def among(self, rank: Rank) -> Among:
        """Who shares with whom: all ranks."""
        return Among(rank, rank)

    async def step(self, rank: Rank, state: Any) -> None:
        for shard in await summed(self.among(rank), self.outstanding, alone=True):
            await rank.update(shard)

    async def gathering(self, rank: Rank, state: Any, bucket: Bucket) -> Coroutine[Op, Any, Tensor]:
        """What brings all of `bucket` here: a child that returns its parameters, (n,)."""
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
        if bucket.index in state:  # it was gathered ahead, and not read
            await rank.wait(state.pop(bucket.index))
        sharers = self.among(rank).sharers
        await rank.hold(bucket.shard(sharers.index, sharers.size))
