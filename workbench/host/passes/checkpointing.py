"""Activation checkpointing: backward computes activations of some units of a model again.

A *unit* is a part between which stages may be cut, such as a transformer's block. It must be a Module of the model, or
hold one such Module, which has children. torch repeats a unit with the same random numbers. Ranks that meet inside a
unit meet again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from workbench.host.placement.stage_cuts import list_parts
from workbench.partitions import Partition
from workbench.rank import StrategyError
from workbench.settings import KnobError
from workbench.tasks import Learner

NO_RECOMPUTE = "none"


def list_units(model: nn.Module, learner: Learner, layers: Partition) -> list[nn.Module]:
    """Raises KnobError if the task defines no units."""
    what, every = layers.recompute
    if what == NO_RECOMPUTE:
        return []
    try:
        parts = list_parts(model, learner)
    except KnobError as error:
        raise KnobError(f"checkpoint={what}: the units of the model are not known ({error})") from error
    own = {id(module) for module in model.modules()} - {id(model)}
    units = [unit for part in parts for unit in (_find_own_module(part, own),) if unit is not None]
    if not units:
        raise KnobError(
            f"checkpoint={what}: none of the model's parts is a Module of the model itself; return such Modules from "
            f"`parts`, or take checkpoint=none"
        )
    return units[::every]


def _find_own_module(part: nn.Module, own: set[int]) -> nn.Module | None:
    if id(part) in own:
        return part
    inner = list(part.children())
    return inner[0] if len(inner) == 1 and id(inner[0]) in own and list(inner[0].children()) else None


class CheckpointedUnits:
    """Makes backward compute units again, or only their attention core."""

    def __init__(self, units: list[nn.Module], what: str, draws: bool = True) -> None:
        self._units = [(unit, unit.__dict__.get("forward")) for unit in units]
        for unit, own in self._units:
            unit.__dict__["forward"] = _UnitForward(unit, own, what, draws)  # precedes the class's

    def restore_forwards(self) -> None:
        for unit, own in reversed(self._units):
            if own is None:
                unit.__dict__.pop("forward", None)
            else:
                unit.__dict__["forward"] = own


@contextmanager
def checkpoint_units(model: nn.Module, learner: Learner, layers: Partition) -> Iterator[None]:
    """Inside, checkpoints a model without values."""
    made = CheckpointedUnits(list_units(model, learner, layers), layers.recompute[0], draws=False)
    try:
        yield
    finally:
        made.restore_forwards()


class _UnitForward:
    """Computes with the copy's weights in a deep copy."""

    def __init__(self, unit: nn.Module, own: Any, what: str, draws: bool) -> None:
        self._unit, self._own, self._what, self._draws = unit, own, what, draws
        run = self._recompute_attention if what == "attention" else self._recompute_unit
        self._run = run if "torch._dynamo" not in sys.modules else torch.compiler.disable(run)

    def __call__(self, *inputs: object, **named: object) -> Any:
        call = self._own or partial(type(self._unit).forward, self._unit)
        return self._run(call, *inputs, **named) if torch.is_grad_enabled() else call(*inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> _UnitForward:
        own = self._own.__deepcopy__(memo) if hasattr(self._own, "__deepcopy__") else self._own
        return _UnitForward(memo.get(id(self._unit), self._unit), own, self._what, self._draws)

    def _recompute_unit(self, call: Callable[..., object], *inputs: object, **named: object) -> Any:
        def context() -> tuple[Any, Any]:
            return nullcontext(), _DiscardedBuffers(self._unit)

        return _run_checkpoint(call, self._draws, inputs, named, context_fn=context)

    def _recompute_attention(self, call: Callable[..., object], *inputs: object, **named: object) -> Any:
        with _AttentionRecompute(self._draws):
            return call(*inputs, **named)


class _AttentionRecompute(TorchFunctionMode):
    """Makes backward repeat only scaled_dot_product_attention."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _run_checkpoint(func, self._draws, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _SavedInput(torch.autograd.Function):
    """Saves a checkpoint's input where the memory account looks for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _run_checkpoint(
    call: Callable[..., object], draws: bool, inputs: tuple[object, ...], named: dict[str, object], **more: Any
) -> Any:
    saved = [_save_input(x) for x in inputs]
    named = {name: _save_input(x) for name, x in named.items()}
    return checkpoint(partial(call, **named), *saved, use_reentrant=False, preserve_rng_state=draws, **more)


def _save_input(x: object) -> Any:
    return _SavedInput.apply(x) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]


class _DiscardedBuffers:
    """Discards a unit's buffer writes, so that running statistics count each batch once.

    Each recomputation enters it. A retained graph has several.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._own: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        modules = self._unit.modules()
        self._own = [(module, name, b) for module in modules for name, b in module._buffers.items() if b is not None]
        for module, name, b in self._own:
            module._buffers[name] = b.clone()

    def __exit__(self, *_: object) -> None:
        for module, name, b in self._own:
            module._buffers[name] = b


def explain_second_gradient(name: str) -> StrategyError:
    """Explains a second gradient in one exchanged backward. torch's DDP refuses it, too."""
    return StrategyError(
        f"parameter {name} received a gradient twice in one backward (re-entrant checkpointing?): "
        f"use_reentrant=False, or a strategy that does not exchange gradients (LocalSGD)"
    )
