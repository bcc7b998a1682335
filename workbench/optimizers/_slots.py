"""What an optimizer remembers, and what of it means the same to another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.optimizers.lamb import Lamb
from workbench.optimizers.lars import Lars

# A slot means the same in all optimizers of one line: a running sum of steps' directions, or Adam's two moments.
MOMENTUM = (torch.optim.SGD, Lars)
MOMENTS = (torch.optim.Adam, torch.optim.AdamW, Lamb)
# Each element's step is a function of that element's gradients alone, so part of a tensor can be stepped by itself.
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def elementwise(optimizer: Any) -> bool:
    """Does `optimizer` step each element by itself? If so its state can be cut anywhere, as ZeRO wants.

    One of your own says so by an attribute `elementwise = True` of its class; what it remembers is then tensors, of the
    parameter's shape or of one number; LARS and LAMB, which look at the norm of
    a whole tensor, cannot.
    """
    return type(optimizer) in ELEMENTWISE or bool(getattr(type(optimizer), "elementwise", False))


def slots(optimizer: Any) -> tuple[str, ...]:
    """The slots per parameter that `optimizer` shares with others of its kind; none if its kind is not known."""
    groups = optimizer.param_groups
    if type(optimizer) in MOMENTUM:
        return ("momentum_buffer",) if any(g["momentum"] for g in groups) else ()
    if type(optimizer) in MOMENTS and not any(g.get("amsgrad") for g in groups):
        return ("exp_avg", "exp_avg_sq", "step")
    return ()


def carry(old: Any, new: Any) -> dict[str, Any]:
    """Gives `new` the slots of `old` that mean the same to it; all others start empty. Both have the same parameters.

    Returns the names of the slots that are "carried", those that start "fresh" and those of `old` that are "dropped",
    and a "text" that says so: `carried: momentum_buffer; fresh: none`.
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
