"""Means over ranks: over all of them, or over those of the group that a Rank stands for."""

from __future__ import annotations

from workbench.rank import Bucket, Rank


async def mean_of_all(rank: Rank, buckets: list[Bucket]) -> None:
    """Each bucket becomes its mean over the ranks, uncompressed; one all-reduce per bucket, all under way at once."""
    pending = []
    for bucket in buckets:
        bucket.data.div_(rank.size)
        pending.append(await rank.start(summed(rank, bucket), name=bucket.name))
    for handle in pending:
        await rank.wait(handle)


async def summed(rank: Rank, bucket: Bucket) -> None:
    """The bucket's sum over the ranks, uncompressed."""
    await rank.all_reduce(bucket.data, "sum", bucket.name)
