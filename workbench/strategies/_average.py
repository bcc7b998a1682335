"""The mean of the ranks' parameters, and a sum by messages around a ring."""

from __future__ import annotations

from workbench.rank import Bucket, Rank
from workbench.strategies._mean import mean_of_all


async def average(rank: Rank) -> None:
    """Sets the parameters of all ranks to their mean, bit-identical on each rank."""
    await mean_of_all(rank, await rank.params())


async def sum_by_messages(rank: Rank, bucket: Bucket) -> None:
    """Sets `bucket` to its sum over all ranks, by messages around the ring.

    It serves ranks that keep a common step but do not meet for changes. It sends an all-reduce's bytes. Within one sum
    every rank receives the report that rank 0 had when the sum began.
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
