"""Checks whether a compressor can keep the optimizer's momentum as a plain sum of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workbench.compressors import inside
from workbench.experiment.compiler_import import put_off_compiler

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView


def explain_refusal(e: ExperimentView, made: Callable[[], Any] | None = None) -> str | None:
    """Returns why `e`'s compressor cannot keep the momentum, with a remedy; or None.

    made: makes `e`'s optimizer for its model. Without it a task's own optimizer passes
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
        made = make_trial(e)
    if is_plain_momentum(optimizer := made()):
        return None
    kind = "Nesterov's" if any(g.get("nesterov") for g in optimizer.param_groups) else type(optimizer).__name__
    return (
        f"compressor={name}: it keeps the momentum itself, and {kind} is not a plain running sum of gradients that "
        f"it can take over; use optimizer=SGD() with it, or {name}(momentum=0)"
    )


def make_trial(e: ExperimentView) -> Callable[[], Any]:
    """Returns a function that makes `e`'s optimizer for a model with 1 parameter of 1 element."""
    put_off_compiler()
    one = [torch.nn.Parameter(torch.zeros(1))]
    return lambda: e.optimizer.make(one, 1.0, lambda lr: torch.optim.SGD(one, lr))


def is_plain_momentum(optimizer: Any) -> bool:
    """Whether a momentum of the optimizer would be a running sum of gradients and weight decay."""
    odd = ("nesterov", "dampening", "maximize")
    return type(optimizer) is torch.optim.SGD and not any(g[name] for g in optimizer.param_groups for name in odd)
