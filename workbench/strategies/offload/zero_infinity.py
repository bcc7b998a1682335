"""ZeRO-Infinity: stage 3 with shards on host or disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor

from workbench.rank import Bucket, Handle, Op, Rank
from workbench.settings import knob
from workbench.strategies._sharded import Outstanding, assembled
from workbench.strategies.offload._host_gradients import run_op, sum_onto_host
from workbench.strategies.offload.verbs import fetch, offload
from workbench.strategies.zero_3 import ZeRO3


@dataclass
class _State:
    """State of one rank; the first three attributes are by bucket.

    coming:    its shard on the way to the device
    gathering: its all-gather under way
    away:      this rank's shard of its parameters, if kept on host or disk
    slots:     whether the optimizer state is there, too
    """

    coming: dict[int, Handle] = field(default_factory=dict)
    gathering: dict[int, Handle] = field(default_factory=dict)
    away: dict[int, Bucket] = field(default_factory=dict)
    slots: bool = False


@dataclass(frozen=True, kw_only=True)
class ZeROInfinity(ZeRO3):
    """ZeRO3 that keeps each rank's shards of parameters and optimizer state on host or disk, and steps them there.

        before forward or backward reads a bucket:   params_r from host or disk, `prefetch` + 1 ahead;
                                                     params <- all ranks' params_r       all-gather, `prefetch` ahead
        once it is read no more:                     nothing of it stays on the device
        g_r <- sum_i grad_i, of rank r's shard, and to the host                          while backward runs
        params_r, state_r <- optimizer(params_r, state_r, g_r)      on the host; from disk one bucket ahead, and back

    A device holds only the buckets that are whole at the time. Of Psi parameters each rank's host or disk holds (4 + K)
    Psi / p bytes in fp32. The host also holds 4 Psi / p bytes of gradients until they are used. The device receives 4
    Psi / p bytes for the forward and again for the backward. It sends as many bytes of gradients. With a disk the
    update adds 2 (4 + K) Psi / p. Every rank reads its own shards over its own path, so p disks are p times as fast as
    1 disk. Network bytes and results are ZeRO3's.

    Ranks write the disk by `pwrite` and read it by `pread`, without the system's cache. The files are in the directory
    for temporary files (TMPDIR). `fabric.host` and `fabric.disk` set the speed of host and disk. One layer and its
    gradient must fit on the device. Cut a larger layer into tiles (`workbench.tasks.TiledLinear`). With clipping,
    gradients stay on the device until ranks know the norm. A model that writes into its parameters is refused.

    When to use it: nothing else fits. Buckets of the size of a layer work best. Compute hides prefetching for as long
    as it lasts.

    Reference: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
    SC 2021, https://arxiv.org/abs/2104.07857, sections 5 and 6
    """

    on: str = knob("disk", choices=("host", "disk"), doc="device of the shards of parameters and optimizer state")

    offloads: ClassVar[bool] = True
    own: ClassVar[dict[str, str]] = {"away": "sum", "coming": "drop", "gathering": "drop", "slots": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        return _State()

    async def step(self, rank: Rank, state: Any) -> None:
        leaves = bool(state.away) and not rank.clip
        shards = await sum_onto_host(self.among(rank), self.outstanding, leaves)
        if not state.away:  # the first step, in which everything is whole
            for shard in shards:
                await rank.update(shard)
            return
        for bucket in await rank.params():
            if bucket.index not in state.away:  # it was recalled, and no pass has read it since
                await self.reshard(rank, state, bucket)
        if not state.slots:
            for shard in shards:
                await offload(rank, shard, "optimizer state", self.on)
            state.slots = True
        if not leaves:
            for shard in shards:
                await offload(rank, shard, "gradients", "host")
        await self._stream(rank, shards)

    async def _stream(self, rank: Rank, shards: list[Bucket]) -> None:
        """Steps shard after shard on the host, while the next shard is fetched and the last one is written back."""
        coming, going = deque[Handle](), Outstanding(rank, 1, "offload")
        for at, shard in enumerate(shards):
            for one in shards[at + len(coming) : at + 2]:
                coming.append(await rank.start(self._come(rank, one), "fetch", f"state {one.index}"))
            await rank.wait(coming.popleft())
            await rank.update(shard, on="host")
            await going.start(self._go(rank, shard), f"state {shard.index}")
        await going.all()

    async def _come(self, rank: Rank, shard: Bucket) -> None:
        await fetch(rank, shard, "parameters", "host")
        await fetch(rank, shard, "optimizer state", "host")

    async def _go(self, rank: Rank, shard: Bucket) -> None:
        await offload(rank, shard, "parameters", self.on)
        await offload(rank, shard, "optimizer state", self.on)

    async def unshard(self, rank: Rank, state: Any, bucket: Bucket, following: Iterator[Bucket]) -> None:
        ahead = [bucket, *islice(following, self.prefetch + 1)]
        for one in ahead:
            if one.index in state.away and one.index not in state.coming and one.index not in state.gathering:
                op = fetch(rank, state.away[one.index], "parameters", keep=True)
                state.coming[one.index] = await rank.start(run_op(op), "fetch", f"params {one.index}")
        for one in ahead[: self.prefetch + 1]:
            if one.index not in state.gathering:
                child = await self.gathering(rank, state, one)
                state.gathering[one.index] = await rank.start(child, name=f"params {one.index}")
        await rank.hold(bucket.like(await rank.wait(state.gathering.pop(bucket.index))))

    async def gathering(self, rank: Rank, state: Any, bucket: Bucket) -> Coroutine[Op, Any, Tensor]:
        sharers = self.among(rank).sharers
        if bucket.index not in state.away:
            return await super().gathering(rank, state, bucket)
        coming = state.coming.pop(bucket.index)

        async def gather() -> Tensor:
            return await assembled(sharers, await rank.wait(coming), bucket)

        return gather()

    async def reshard(self, rank: Rank, state: Any, bucket: Bucket) -> None:
        for under_way in (state.coming, state.gathering):
            if bucket.index in under_way:  # it was fetched ahead and not read
                await rank.wait(under_way.pop(bucket.index))
        sharers = self.among(rank).sharers
        shard = bucket.shard(sharers.index, sharers.size)
        if bucket.index not in state.away:
            shard = await rank.hold(shard)
            await offload(rank, shard, "parameters", self.on)
            state.away[bucket.index] = shard.like(shard.data.new_zeros(1).expand(shard.data.numel()))
        await rank.hold(shard.like(shard.data[:0]))

    def aside(self, state: Any) -> list[Bucket]:
        away, state.away = list(state.away.values()), {}
        return away

    async def stow(self, rank: Rank, state: Any, bucket: Bucket) -> None:
        await self.reshard(rank, state, bucket)
        if state.slots:
            await offload(rank, state.away[bucket.index], "optimizer state", self.on)

    async def recall(self, rank: Rank, state: Any) -> None:
        """Brings all shards back to the device, as ZeRO3 keeps them."""
        for shard in state.away.values():
            await rank.hold(shard.like(await fetch(rank, shard, "parameters")))
            if state.slots:
                await fetch(rank, shard, "optimizer state")
        state.away, state.slots = {}, False
