"""The state of optimizers, and which of it has the same meaning in another optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.optimizers.lamb import Lamb
from workbench.optimizers.lars import Lars

# Slots have the same meaning within a line: a running sum of the steps' directions, or Adam's two moments.
MOMENTUM = (torch.optim.SGD, Lars)
MOMENTS = (torch.optim.Adam, torch.optim.AdamW, Lamb)
# Each element's step depends on that element's gradients only, so a part of a tensor can be stepped alone.
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def elementwise(optimizer: Any) -> bool:
    """Whether `optimizer` steps each element by itself, so that ZeRO can cut its state anywhere.

    A class of your own declares it by an attribute `elementwise = True`. Its state must then be tensors of the
    parameter's shape, or of one number. LARS and LAMB use norms of whole tensors, so they cannot.
    """
    return type(optimizer) in ELEMENTWISE or bool(getattr(type(optimizer), "elementwise", False))


def slots(optimizer: Any) -> tuple[str, ...]:
    """Returns the slots per parameter that `optimizer` shares with its line; () if unknown."""
    groups = optimizer.param_groups
    if type(optimizer) in MOMENTUM:
        return ("momentum_buffer",) if any(g["momentum"] for g in groups) else ()
    if type(optimizer) in MOMENTS and not any(g.get("amsgrad") for g in groups):
        return ("exp_avg", "exp_avg_sq", "step")
    return ()


def carry(old: Any, new: Any) -> dict[str, Any]:
    """Gives `new` the slots of `old` with the same meaning. Other slots start empty. Both have the same parameters.

    Returns the names of slots that are "carried", start "fresh" or are "dropped". It adds a "text" such as `carried:
    momentum_buffer; fresh: none`.
    """
    there = {name for held in old.state.values() for name, x in held.items() if isinstance(x, Tensor)}
    shared = set(slots(old)) & set(slots(new)) & there
    for p, held in old.state.items():
        kept = {name: held[name] for name in shared if isinstance(held.get(name), Tensor)}
        if kept:
            new.state[p] = kept
    fresh, dropped = set(slots(new)) - shared, there - shared
    moved = {"carried": sorted(shared), "fresh": sorted(fresh), "dropped": sorted(dropped)}
    said = [f"{what}: {', '.join(names) or 'none'}" for what, names in moved.items() if names or what != "dropped"]
    return {**moved, "text": "; ".join(said)}
