"""Who may keep the optimizer's momentum: a compressor that does needs gradients and a plain sum of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workbench.compressors import inside
from workbench.experiment.light import lighten

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment


def refused(e: Experiment, made: Callable[[], Any] | None = None) -> str | None:
    """Why `e`'s compressor cannot keep the momentum, in a sentence that says what would do; or None.

    made: makes `e`'s optimizer for its model; without it nothing is said of a task's own, which shows only then.
    """
    name = next((type(c).__name__ for c in inside(e.compressor) if c.carries), None)
    if name is None:
        return None
    if e.strategy.exchanges != "gradients":
        return (
            f"compressor={name}: it keeps a momentum of gradients, and {type(e.strategy).__name__} exchanges "
            f"{e.strategy.exchanges}; use DDP with it, or {name}(momentum=0)"
        )
    if made is None:
        if e.optimizer.of_task:
            return None
        made = tried(e)
    if plain(optimizer := made()):
        return None
    kind = "Nesterov's" if any(g.get("nesterov") for g in optimizer.param_groups) else type(optimizer).__name__
    return (
        f"compressor={name}: it keeps the momentum itself, and {kind} is no plain sum of gradients that could be "
        f"handed over; use optimizer=SGD() with it, or {name}(momentum=0)"
    )


def tried(e: Experiment) -> Callable[[], Any]:
    """Makes `e`'s optimizer for a model of one parameter of one element."""
    lighten()
    one = [torch.nn.Parameter(torch.zeros(1))]
    return lambda: e.optimizer.make(one, 1.0, lambda lr: torch.optim.SGD(one, lr))


def plain(optimizer: Any) -> bool:
    """Is its momentum, if it has one, a running sum of gradients and of what weight decay adds to them?"""
    odd = ("nesterov", "dampening", "maximize")
    return type(optimizer) is torch.optim.SGD and not any(g[name] for g in optimizer.param_groups for name in odd)
