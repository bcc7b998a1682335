"""Means over ranks: over all ranks, or over the group that a Rank stands for."""

from __future__ import annotations

from workbench.rank import Bucket, Rank


async def mean_of_all(rank: Rank, buckets: list[Bucket]) -> None:
    """Sets each bucket to its uncompressed mean over the ranks; the all-reduces of all buckets run at once."""
    pending = []
    for bucket in buckets:
        bucket.data.div_(rank.size)
        pending.append(await rank.start(sum_bucket(rank, bucket), name=bucket.name))
    for handle in pending:
        await rank.wait(handle)


async def sum_bucket(rank: Rank, bucket: Bucket) -> None:
    """Sets the bucket to its uncompressed sum over the ranks."""
    await rank.all_reduce(bucket.data, "sum", bucket.name)
