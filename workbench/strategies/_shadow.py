"""What strategies with a shadow share: how often it synchronises, on the record, and what its round begins with."""

from __future__ import annotations

from workbench.rank import Bucket, Memory, Rank


class Shadow:
    """What one rank remembers of its shadow: the steps made since it synchronised last, and what it keeps."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.since = 0

    async def synchronised(self, rank: Rank) -> None:
        """A round is over: the Sample "sync gap" says how many steps this rank has made since the one before."""
        await rank.sample("sync gap", self.since)
        self.since = 0


async def ranks_mean(rank: Rank, bucket: Bucket) -> tuple[Bucket, Bucket]:
    """The parameters of `bucket` as they are now, and their mean over all ranks, which comes later."""
    before = bucket.like(bucket.data.clone())
    mean = bucket.like(before.data / rank.size)
    await rank.all_reduce(mean.data, "sum", f"shadow {bucket.name}")
    return before, mean
