"""Means over ranks: over all of them by collectives, over a group that is not all of them by messages."""

from __future__ import annotations

from torch import Tensor

from workbench.rank import Bucket, Rank


async def mean_of_all(rank: Rank, buckets: list[Bucket]) -> None:
    """Each bucket becomes its mean over all ranks, uncompressed; one all-reduce per bucket, all under way at once."""
    pending = []
    for bucket in buckets:
        bucket.data.div_(rank.size)
        pending.append(await rank.start(summed(rank, bucket), name=bucket.name))
    for handle in pending:
        await rank.wait(handle)


async def summed(rank: Rank, bucket: Bucket) -> None:
    """The bucket's sum over all ranks, uncompressed."""
    await rank.all_reduce(bucket.data, "sum", bucket.name)


def members(index: int, group: int) -> range:
    """The ranks of `index`'s group, where each `group` consecutive ranks make one."""
    first = index - index % group
    return range(first, first + group)


async def group_mean(rank: Rank, group: range, vectors: dict[str, Tensor]) -> None:
    """Each flat tensor becomes its mean over the ranks of `group`, in place and bit for bit the same on all of them.

    A reduce-scatter and an all-gather: each rank adds up one of g pieces and sends it to the others. From n bytes
    it sends n + (g - 2) times its own piece, which is 2 (g-1)/g n where g divides the elements.
    """
    me, size = group.index(rank.index), len(group)
    cut = {name: whole.tensor_split(size) for name, whole in vectors.items()}
    others = [(piece, other) for piece, other in enumerate(group) if piece != me]
    for name, pieces in cut.items():
        for piece, other in others:
            await rank.send(pieces[piece], other, f"share of {name}")
    for name, pieces in cut.items():
        mine, total = pieces[me], pieces[me].new_zeros(pieces[me].shape)
        for piece, other in enumerate(group):
            if piece == me:
                total.add_(mine)
            else:
                theirs, _ = await rank.recv(mine.new_empty(mine.shape), other, f"share of {name}")
                total.add_(theirs)
        mine.copy_(total.div_(size))
        for _, other in others:
            await rank.send(mine, other, f"mean of {name}")
    for name, pieces in cut.items():
        for piece, other in others:
            await rank.recv(pieces[piece], other, f"mean of {name}")
