"""The mean of all ranks' parameters, which is what many strategies leave behind."""

from __future__ import annotations

from workbench.ops import Rank


async def average(rank: Rank) -> None:
    """The parameters become their mean over all ranks, bit for bit the same on each."""
    for bucket in await rank.params():
        bucket.data.div_(rank.size)
        await rank.all_reduce(bucket.data, "sum", bucket.name)
