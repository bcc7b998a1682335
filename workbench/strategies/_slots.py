"""Keeping, averaging or zeroing each rank's optimizer state (its slots) at an averaging."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from workbench.rank import Rank, as_real, outlined, values_of

MOMENTUM_CHOICES = ("keep", "average", "zero")


async def combine_slots(rank: Rank, momentum: str) -> None:
    """Keeps, averages or zeroes the optimizer state over the ranks that `rank` stands for.

    "average" sends the slots as one vector in fp32 at least. These are as many bytes as the parameters for SGD with
    momentum, and twice as many for Adam.
    """
    if momentum == "keep" or not (slots := await rank.slots()):
        return
    if momentum == "zero":
        for slot in slots:
            slot.zero_()
        return
    slots = [as_real(slot) for slot in slots]
    flat = _joined(slots)
    await rank.all_reduce(flat, "sum", "momentum")
    flat.div_(rank.size)
    _put_back(flat, slots)


async def bring_together(rank: Rank) -> None:
    """Makes optimizer states the same on all ranks: their mean, or zero if their sizes differ.

    Sizes differ if a parameter never had a gradient on one rank. Ranks compare them with 16 bytes.
    """
    numel = sum(slot.numel() for slot in await rank.slots())
    bounds = (await rank.params())[0].data.new_tensor([numel, -numel], dtype=torch.int64)
    await rank.all_reduce(bounds, "max", "size of momentum")
    alike = int(values_of(bounds, otherwise=0).sum()) == 0
    await combine_slots(rank, "average" if alike else "zero")


def _joined(slots: list[Tensor]) -> Tensor:
    """Returns all slots as one vector, on the device of the largest slot: `(n,)` in fp32 or the widest slot's dtype."""
    largest = max(slots, key=lambda slot: slot.numel())
    widest = reduce(torch.promote_types, (slot.dtype for slot in slots), torch.float32)
    flat = torch.empty(sum(s.numel() for s in slots), dtype=widest, device=largest.device)
    _fill(flat, slots)
    return flat


@outlined(lambda flat, slots: None)
def _fill(flat: Tensor, slots: list[Tensor]) -> None:
    for slot, piece in _pieces(flat, slots):
        piece.copy_(slot)


@outlined(lambda flat, slots: None)
def _put_back(flat: Tensor, slots: list[Tensor]) -> None:
    for slot, piece in _pieces(flat, slots):
        slot.copy_(piece)


def _pieces(flat: Tensor, slots: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    pieces = flat.split([s.numel() for s in slots])
    return [(slot, piece.view(slot.shape)) for slot, piece in zip(slots, pieces, strict=True)]
