"""ZeRO-Offload: stage 2 with optimizer state and updates on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from workbench.rank import Bucket, Handle, Rank
from workbench.settings import knob
from workbench.strategies._sharded import ShardGroups, fill, gathered
from workbench.strategies.offload._host_gradients import sum_onto_host
from workbench.strategies.offload.verbs import fetch, offload
from workbench.strategies.zero_2 import ZeRO2


@dataclass
class _State:
    """State of one rank.

    shards:  this rank's shards, while they are on the host
    updates: the updates that run there, in order
    """

    shards: list[Bucket] = field(default_factory=list)
    updates: list[tuple[Bucket, Handle]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ZeROOffload(ZeRO2):
    """ZeRO2 with the optimizer state and a copy of each rank's parameter shard on its host, which steps them.

        g_r <- sum_i grad_i, of rank r's shard, and to the host            while backward runs
        params_r, state_r <- optimizer(params_r, state_r, g_r)             on the host's processor
        params <- all ranks' params_r, from the host                       all-gather

    Of Psi parameters a device holds 2 Psi bytes in 16 bits (4 Psi in fp32). It also holds the buckets that backward has
    just filled. The host holds K Psi / p and a copy of the shards, 4 Psi / p. In each step 4 Psi / p bytes in fp32 go
    to the host and 4 Psi / p return. This is the minimum if optimizer state stays on the host. `fabric.host` sets the
    speed. Network bytes and results are ZeRO2's. With clipping, gradients stay on the device until ranks know the norm.
    A model that writes into its parameters is refused, because the host steps its own copy.

    `delayed` is the paper's delayed parameter update. From step `delay_from` on the host steps while the device
    computes the next forward and backward. Their gradients are then one update stale. Each gradient is applied once.

    When to use it: parameters fit on the device, but their optimizer state does not. The host must be fast enough. One
    rank alone gains as much. On a CPU, device and host share one memory and differ only by name.

    Reference: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021,
    https://arxiv.org/abs/2101.06840, sections 4 and 5.2
    """

    delayed: bool = knob(
        False, doc="update on the host during the next forward and backward: gradients are one update older"
    )
    delay_from: int = knob(
        40, 0, 10**6, unit="steps", doc="first step with the delayed update, because early steps change the most"
    )

    in_flight: ClassVar[bool] = True
    offloads: ClassVar[bool] = True
    own: ClassVar[dict[str, str]] = {"shards": "sum", "updates": "sum"}

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        if not state.shards:
            await self._send(rank, state)
        shards = await sum_onto_host(ShardGroups(rank, rank), self.outstanding, leaves=not rank.clip)
        await self._arrive(rank, state)
        for shard in shards:
            if rank.clip:
                await offload(rank, shard, "gradients", "host")
            update = await rank.start(_updated(rank, shard), "offload", f"update {shard.index}")
            state.updates.append((shard, update))
        if not self.delayed or rank.step < self.delay_from:
            await self._arrive(rank, state)

    async def _send(self, rank: Rank, state: _State) -> None:
        state.shards = [bucket.shard(rank.index, rank.size) for bucket in await rank.params()]
        for shard in state.shards:
            await offload(rank, shard, "parameters", "host")
            await offload(rank, shard, "optimizer state", "host")

    async def _arrive(self, rank: Rank, state: _State) -> None:
        """Waits for the host's updates, and gathers the new parameters on all ranks."""
        params = await rank.params() if state.updates else []
        for shard, update in state.updates:
            whole = params[shard.index]
            fill(whole.shard(rank.index, rank.size).data, await rank.wait(update))
            await gathered(rank, whole)
        state.updates.clear()

    async def drain(self, rank: Rank, state: _State) -> None:
        await self._arrive(rank, state)

    async def recall(self, rank: Rank, state: _State) -> None:
        await self._arrive(rank, state)
        for shard in state.shards:
            await fetch(rank, shard, "optimizer state")
            await fetch(rank, shard, "parameters")  # the model has its own copy
        state.shards = []


async def _updated(rank: Rank, shard: Bucket) -> Tensor:
    """Steps a shard on the host. Returns its new parameters `(n,)` on the device."""
    await rank.update(shard, on="host")
    params: Tensor = await fetch(rank, shard, "parameters", keep=True)
    return params
