"""All-reduces by messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.fabric import Algorithm, Among, Fabric
from workbench.rank import Op, Rank


def choose_algorithm(fabric: Fabric, size: int, op: Op) -> Algorithm | None:
    """Returns the Fabric's algorithm for `op` in a run of `size` ranks; None if the backend performs it.

    The backend performs measurements, unseen by timelines.
    """
    if fabric.algorithm.native or op.verb != "all_reduce" or op.measures or not op.args[0].numel():
        return None
    ranks, x = _list_ranks(op, size), op.args[0]
    if len(ranks) == 1:
        return None
    chosen = fabric.algorithm.chosen(fabric, op.group, ranks, x.numel() * x.element_size())
    return None if chosen.native else chosen


def divides_first(op: Op) -> bool:
    """Whether each rank divides before a mean, as NCCL does, because a float16 sum may overflow."""
    return bool(op.verb == "all_reduce" and op.args[1] == "mean" and op.args[0].dtype == torch.float16)


async def run_all_reduce(by: Algorithm, rank: Rank, op: Op, name: str) -> Tensor:
    """Performs one rank's part. The sum or mean replaces `op`'s tensor and is returned.

    name: the kind of the messages; no other group or lane may use it at the time
    """
    x: Tensor = op.args[0]
    how, ranks = op.args[1], _list_ranks(op, rank.size)
    flat = x.contiguous().view(-1)
    if divides_first(op):
        flat /= len(ranks)
    await by.all_reduce(Among(rank, ranks, "sum" if how == "mean" else how, name), flat)
    if how == "mean" and not divides_first(op):
        flat /= len(ranks)
    return x if x.is_contiguous() else x.copy_(flat.view(x.shape))


def _list_ranks(op: Op, size: int) -> Sequence[int]:
    return range(size) if op.group is None else op.group.ranks
