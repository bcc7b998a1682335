"""All-reduces in messages: which algorithm the Fabric names for one, and one rank's part in it, for both hosts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.fabric import Algorithm, Among, Fabric
from workbench.rank import Op, Rank


def algorithm(fabric: Fabric, size: int, op: Op) -> Algorithm | None:
    """By which the all-reduce `op` goes in a run of `size` ranks; None where the backend performs it, or any other op.

    What is only measured goes the backend's way, which shows on no timeline.
    """
    if fabric.algorithm.native or op.verb != "all_reduce" or op.measures or not op.args[0].numel():
        return None
    ranks, x = _ranks(op, size), op.args[0]
    if len(ranks) == 1:
        return None
    chosen = fabric.algorithm.chosen(fabric, op.group, ranks, x.numel() * x.element_size())
    return None if chosen.native else chosen


async def summed(by: Algorithm, rank: Rank, op: Op, name: str) -> Tensor:
    """One rank's part; `op`'s tensor becomes the sum, and is returned. A mean is the sum divided where it has come.

    name: the kind of its messages, no other group's nor lane's at the time
    """
    x: Tensor = op.args[0]
    how, ranks = op.args[1], _ranks(op, rank.size)
    flat = x.contiguous().view(-1)
    await by.all_reduce(Among(rank, ranks, "sum" if how == "mean" else how, name), flat)
    if how == "mean":
        flat /= len(ranks)
    return x if x.is_contiguous() else x.copy_(flat.view(x.shape))


def _ranks(op: Op, size: int) -> Sequence[int]:
    return range(size) if op.group is None else op.group.ranks
