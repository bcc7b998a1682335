"""Observes the gradients of a copy that `fully_shard` trains, and returns what its forward has changed.

[Note: Gradients of unused parameters] torch sums zeros for a parameter that this rank did not use, because every rank
has to send the same bytes. So ranks observe the gradients themselves, and agree on the parameters that no rank used
(`host/sharding/parameter_usage.py`). These lose their gradient before the update, as under DDP.

[Note: Hooks on gradients] A model may have hooks on its parameters' gradients. The copy's whole parameters call them
with this rank's gradient, before torch sums it, as under DDP. At the end the run's own model gets the hooks that the
copy's forward registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.core.gradient_hooks import require_gradient
from workbench.host.placement import unmaterialized


class GradientListener:
    """Hooks on the whole parameters with which a copy computes.

    own:  the run's own parameters, by name
    made: the copy's whole parameters that exist, by name
    used: names of the parameters that this rank has used since the last update
    """

    def __init__(self, own: dict[str, nn.Parameter], trained: Iterable[str]) -> None:
        self.own = own
        self._trained = {name: own[name].requires_grad for name in trained}  # not frozen since then
        self.made: dict[str, nn.Parameter] = {}
        self.used: set[str] = set()
        self._handles: dict[str, list[Any]] = {}  # of this rank's hooks, by parameter

    def attach_hooks(self, shards: Mapping[str, Tensor]) -> None:
        """Hooks the parameters that are trained now. Called before a backward.

        A parameter that this rank has frozen gets a gradient of zeros, because other ranks may train it.

        shards: the copy's parameters, by name
        """
        self.settle_frozen(shards)
        self._move_hooks(shards)
        for name, p in self.made.items():
            if p.requires_grad and name not in self._handles:
                self._handles[name] = _attach_listener(name, p, self.own[name], self.used.add)
            elif not p.requires_grad and p.grad is None:
                give_gradient(p, torch.zeros_like(p))

    def _move_hooks(self, shards: Mapping[str, Tensor]) -> None:
        """Moves hooks that a forward put on shards to whole parameters: only these have gradients."""
        for name, p in self.made.items():
            if (shard := shards[name]) is p:
                continue
            before, after = _find_hooks(shard)
            for hook in before.values() if p.requires_grad else ():
                p.register_hook(hook)
            for hook in after.values() if p.requires_grad else ():
                p.register_post_accumulate_grad_hook(hook)
            if p.requires_grad:
                before.clear()
                after.clear()

    def settle_frozen(self, shards: Mapping[str, Tensor]) -> None:
        """Trains or freezes a parameter in all its forms, if the user's code has changed one form.

        An evaluation changes the run's own parameters. A forward changes the copy's, whole or in shards. At each gather
        torch copies the shard's flag to the whole parameter.
        """
        with unmaterialized.prevent_fetches():
            for name, trained in self._trained.items():
                forms = [p for p in (self.own[name], shards[name], self.made.get(name)) if p is not None]
                if any(p.requires_grad != trained for p in forms):
                    self._trained[name] = not trained
                    for p in forms:
                        p.requires_grad_(not trained)

    def return_hooks(self) -> None:
        """Moves the hooks that the copy's forward has registered to the run's own parameters."""
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
    """Sets or removes a gradient."""
    p.grad = grad


def _find_hooks(p: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns (hooks on a gradient, hooks that run after it has been added)."""
    with unmaterialized.prevent_fetches():
        return p._backward_hooks or {}, p._post_accumulate_grad_hooks or {}


def _attach_listener(name: str, p: nn.Parameter, own: nn.Parameter, note: Callable[[str], None]) -> list[Any]:
    """Makes `p` call the hooks of `own`, then `note`. Returns the handles."""
    before, after = _find_hooks(own)

    def change(grad: Tensor) -> Tensor:
        for hook in (*before.values(),):
            made = hook(grad)
            grad = grad if made is None else made
        return grad

    def receive(p: Tensor) -> None:
        for hook in (*after.values(),):
            hook(p)
        if require_gradient(name, p) and p.requires_grad:  # a frozen one has zeros
            note(name)
        if p.grad is not None and p.grad.is_sparse:
            give_gradient(p, p.grad.to_dense())

    handles: list[Any] = [p.register_hook(change)] if before else []
    return [*handles, p.register_post_accumulate_grad_hook(receive)]


def copy_attributes(of: nn.Module, to: nn.Module) -> None:
    """Copies plain attributes that a forward may change, such as a count of calls, to the same modules.

    `to` also shares the modules that the forward has added, and loses those it has removed.
    """
    for name, theirs in of.named_modules():
        ours = to.get_submodule(name)
        for child in ours._modules.keys() - theirs._modules.keys():
            del ours._modules[child]
        for child, added in theirs._modules.items():
            if child not in ours._modules:
                setattr(ours, child, added)
        for attribute, value in vars(theirs).items():
            if not attribute.startswith("_") and attribute != "training":
                if isinstance(value, bool | int | float | str | None):
                    setattr(ours, attribute, value)
