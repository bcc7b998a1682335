"""Listens to the gradients of a copy that `fully_shard` trains, and gives back what its forward has changed.

[Note: Gradients of unused parameters] torch sums a gradient of zeros for a parameter that this rank did not use,
because every rank has to send the same bytes. So the rank listens to the gradients itself. All ranks then agree on the
parameters that no rank used (`host/sharding/usage.py`), and these lose their gradient before the update, as under DDP.

[Note: Hooks on gradients] A model may have hooks on the gradients of its parameters. The copy's whole parameters call
them with this rank's gradient, before torch sums it, as under DDP. Hooks that the copy's forward registers go to the
run's own model at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.core.gradient_hooks import require_gradient
from workbench.host.placement import unmaterialized


class GradientListener:
    """Hooks on the whole parameters of a copy, which are the ones that it computes with.

    own:  the run's own parameters, by name
    made: the copy's whole parameters that exist, by name
    used: names of the parameters that this rank has used since the last update
    """

    def __init__(self, own: dict[str, nn.Parameter]) -> None:
        self.own = own
        self.made: dict[str, nn.Parameter] = {}
        self.used: set[str] = set()
        self._handles: dict[str, list[Any]] = {}  # of this rank's hooks, by parameter

    def attach_hooks(self) -> None:
        """Before a backward: puts hooks on the parameters that are trained now.

        A parameter that this rank has frozen gets a gradient of zeros, because other ranks may train it.
        """
        for name, p in self.made.items():
            if p.requires_grad and name not in self._handles:
                self._handles[name] = _attach_listener(name, p, self.own[name], self.used.add)
            elif not p.requires_grad and p.grad is None:
                give_gradient(p, torch.zeros_like(p))

    def copy_frozen(self) -> None:
        """After a backward: the run's own parameters are trained or frozen as the model has left the copy's."""
        for name, p in self.made.items():
            if self.own[name].requires_grad != p.requires_grad:
                self.own[name].requires_grad_(p.requires_grad)

    def return_hooks(self) -> None:
        """Moves hooks that the copy's forward has registered to the run's own parameters."""
        for name, handles in self._handles.items():
            for handle in handles:
                handle.remove()
            p, own = self.made[name], self.own[name]
            before, after = _find_hooks(p)
            for hook in before.values() if own.requires_grad else ():
                own.register_hook(hook)
            for hook in after.values() if own.requires_grad else ():
                own.register_post_accumulate_grad_hook(hook)


def give_gradient(p: Tensor, grad: Tensor | None) -> None:
    """Replaces or removes the gradient of a parameter."""
    p.grad = grad


def _find_hooks(p: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the hooks on a gradient, and those that run after it has been added."""
    with unmaterialized.prevent_fetches():
        return p._backward_hooks or {}, p._post_accumulate_grad_hooks or {}


def _attach_listener(name: str, p: nn.Parameter, own: nn.Parameter, note: Callable[[str], None]) -> list[Any]:
    """Puts hooks on `p` that call the hooks of `own`, and then `note`. Returns their handles."""
    before, after = _find_hooks(own)

    def change(grad: Tensor) -> Tensor:
        for hook in (*before.values(),):
            made = hook(grad)
            grad = grad if made is None else made
        return grad

    def receive(p: Tensor) -> None:
        for hook in (*after.values(),):
            hook(p)
        require_gradient(name, p)
        note(name)
        if p.grad is not None and p.grad.is_sparse:
            give_gradient(p, p.grad.to_dense())

    handles: list[Any] = [p.register_hook(change)] if before else []
    return [*handles, p.register_post_accumulate_grad_hook(receive)]


def copy_attributes(of: nn.Module, to: nn.Module) -> None:
    """Copies the plain attributes that a forward may change, such as a count of its calls, to the same modules."""
    for theirs, ours in zip(of.modules(), to.modules(), strict=True):
        for name, value in vars(theirs).items():
            if not name.startswith("_") and name != "training" and isinstance(value, bool | int | float | str | None):
                setattr(ours, name, value)
