"""A task's model as shapes without memory: on torch's meta device, or as tensors that say that they lie on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.tasks import Learner, stands_for

FILLS = frozenset(
    "normal_ uniform_ trunc_normal_ kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_".split()
)


class _Unfilled(TorchFunctionMode):
    """Inside, tensors without values are not filled by chance: for that alone torch would import 300 modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        into = args[0] if args else named.get("tensor")
        if getattr(func, "__name__", "") in FILLS and isinstance(into, Tensor) and into.is_meta:
            return into
        return func(*args, **named)


def outline(learner: Learner, built: bool = True) -> nn.Module:
    """The model on the meta device: built there, or, if it does not let itself be, a copy without its tensors' values.

    built: may it be built really for that? If not, what it raises on the meta device is raised here. Raises what
    `copy.deepcopy` does where such a model cannot be copied: it may be the very one that is trained.
    """
    try:
        with torch.device("meta"), _Unfilled():
            model = learner.model()
    except Exception:
        if not built:
            raise
        model = learner.model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"task.model() must return a torch Module, not a {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    if not all(x.is_meta for x in tensors):
        model = copy.deepcopy(model, {id(x): _empty(x) for x in tensors})
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:  # one that is tied stays tied
                empty = known.setdefault(id(p), _empty(p))
                module._parameters[name] = empty
                known[id(empty)] = empty
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else torch.empty_like(b, device="meta")
    return model.train()


def _empty(x: Tensor) -> Tensor:
    """The same on the meta device."""
    made = torch.empty_like(x, device="meta")
    return stands_for(nn.Parameter(made, x.requires_grad), x) if isinstance(x, nn.Parameter) else made


def put_on_cpu(model: nn.Module) -> None:
    """A model on the meta device says from now on that it lies on a CPU; what is tied stays tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                made[id(p)] = stands_for(nn.Parameter(like(p), p.requires_grad), p)
            module._parameters[name] = made.get(id(p))
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else like(b)


def like(x: Any) -> Any:
    """Tensors without values on the CPU, of the sizes of those in `x`; anything else as it is."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, dict):
        filled = {k: like(v) for k, v in x.items()}
        return filled if type(x) is dict else type(x)(filled)
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(like(v) for v in x)
    return x
