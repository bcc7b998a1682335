"""Shared by strategies that offload: gradients that leave the device while backward runs."""

from __future__ import annotations

from typing import Any

from workbench.rank import Bucket, Op
from workbench.strategies._sharded import Outstanding, ShardGroups, sum_into_shards
from workbench.strategies.offload.verbs import offload


async def sum_onto_host(among: ShardGroups, outstanding: int, leaves: bool) -> list[Bucket]:
    """Makes one forward and backward. Returns this rank's shards of the summed gradients.

    outstanding: how many exchanges, and how many transfers, may be under way at a time
    leaves:      whether each shard goes to the host as soon as it is summed
    """
    rank = among.rank
    going = Outstanding(rank, outstanding, "offload")

    async def send_to_host(shard: Bucket) -> None:
        await going.start(run_op(offload(rank, shard, "gradients", "host")), f"gradients {shard.index}")

    shards = await sum_into_shards(among, outstanding, alone=True, leaves=send_to_host if leaves else None)
    await going.all()
    return shards


async def run_op(op: Op) -> Any:
    """Runs a single Op as a child."""
    return await op
