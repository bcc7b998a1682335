"""Models without values: on torch's meta device, or tensors that claim to be on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.tasks import Learner, stands_for

FILL_FUNCTIONS = frozenset(
    "normal_ uniform_ trunc_normal_ kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_".split()
)


class _NoFills(TorchFunctionMode):
    """Skips random fills of meta tensors, because torch would import 300 modules for them."""

    def __torch_function__(self, func: Callable[..., object], types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        named = kwargs or {}
        into = args[0] if args else named.get("tensor")
        if getattr(func, "__name__", "") in FILL_FUNCTIONS and isinstance(into, Tensor) and into.is_meta:
            return into
        return func(*args, **named)


def make_outline(learner: Learner, built: bool = True) -> nn.Module:
    """Returns the task's model on the meta device: built there, or copied without values.

    Copies a model built elsewhere, because it may be training. Raises `copy.deepcopy`'s error.

    built: whether it may be built with values; if not, raises the model's error on the meta device
    """
    try:
        with torch.device("meta"), _NoFills():
            model = learner.model()
    except Exception:
        if not built:
            raise
        model = learner.model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"task.model() must return a torch Module, not a {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    if not all(x.is_meta for x in tensors):
        model = copy.deepcopy(model, {id(x): _make_empty(x) for x in tensors})
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                empty = known.setdefault(id(p), _empty_parameter(p))  # tied ones stay tied
                module._parameters[name] = empty
                known[id(empty)] = empty
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else torch.empty_like(b, device="meta")
    return model.train()


def _make_empty(x: Tensor) -> Tensor:
    return _empty_parameter(x) if isinstance(x, nn.Parameter) else torch.empty_like(x, device="meta")


def _empty_parameter(x: nn.Parameter) -> nn.Parameter:
    made: nn.Parameter = stands_for(nn.Parameter(torch.empty_like(x, device="meta"), x.requires_grad), x)
    return made


def put_on_cpu(model: nn.Module) -> None:
    """Replaces a model's meta tensors by CPU tensors without values. Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                made[id(p)] = stands_for(nn.Parameter(make_like(p), p.requires_grad), p)
            module._parameters[name] = made.get(id(p))
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else make_like(b)


def make_like(x: object) -> Any:
    """Replaces tensors by CPU tensors without values."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, dict):
        filled = {k: make_like(v) for k, v in x.items()}
        return filled if type(x) is dict else type(x)(filled)
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(make_like(v) for v in x)
    return x
