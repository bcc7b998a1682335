"""The mean of all ranks' parameters, which is what many strategies leave behind, and a sum by messages."""

from __future__ import annotations

from workbench.rank import Bucket, Rank
from workbench.strategies._mean import mean_of_all


async def average(rank: Rank) -> None:
    """The parameters become their mean over all ranks, bit for bit the same on each."""
    await mean_of_all(rank, await rank.params())


async def sum_by_messages(rank: Rank, bucket: Bucket) -> None:
    """`bucket` becomes the sum over all ranks, round the ring: for ranks that keep a step, but do not meet for changes.

    The bytes are those of an all-reduce. Within one sum every rank hears of what rank 0 knew when it began.
    """
    parts = [bucket.shard(k, rank.size).data for k in range(rank.size)]
    left, right = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
    for k in range(2 * (rank.size - 1)):
        await rank.send(parts[(rank.index - k) % rank.size], right, bucket.name)
        mine = parts[(rank.index - k - 1) % rank.size]
        theirs, _ = await rank.recv(mine.new_empty(mine.shape), left, bucket.name)
        if k < rank.size - 1:
            mine.add_(theirs)
        else:
            mine.copy_(theirs)
