"""Adopts a script's own model and loss, and checks that they fit the data."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from workbench.settings import KnobError
from workbench.tasks._chance import Chance
from workbench.tasks._loader_shards import Examples, Micros, Whole


class Model:
    """() -> a new CPU copy of the Module at adoption. Freezes parameters that the optimizer lacks."""

    def __init__(self, model: nn.Module, groups: dict[str, int]) -> None:
        self.kind, self.groups = type(model).__name__, groups
        self.model = _copied(model).cpu()
        for name, p in self.model.named_parameters():
            p.requires_grad_(p.requires_grad and name in groups)

    def __call__(self) -> nn.Module:
        made = copy.deepcopy(self.model)
        for name, p in made.named_parameters():
            if name in self.groups:
                p.optimizer_group = self.groups[name]  # type: ignore[attr-defined]
        return made

    def __repr__(self) -> str:
        return f"adopted {self.kind}"


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise KnobError(f"model={type(model).__name__}: cannot be copied to ranks ({error}); adopt it before its first "
                        f"forward or remove the attribute that cannot be copied") from None  # fmt: skip


class Loss:
    """`(model, batch)` -> scalar: the script's own function, or its criterion of output and target.

    micros: micro-batches per step; their losses are averaged
    autocast: dtype for torch.autocast; None: off
    """

    def __init__(self, loss: Any, judges: bool, micros: int, autocast: torch.dtype | None) -> None:
        self.loss, self.judges, self.micros, self.autocast = loss, judges, micros, autocast

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.micros == 1:
            return self._of(model, batch)
        return sum(self._of(model, part) / self.micros for part in batch)

    def _of(self, model: Any, batch: Any) -> Any:
        device = next(model.parameters()).device
        with self._precision(device.type):
            if not self.judges:
                return self.loss(model, batch)
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise TypeError(f"a batch is a {type(batch).__name__}, and a criterion needs (input, target)")
            if isinstance(self.loss, nn.Module) and device.type == "cuda":
                self.loss.to(device)  # it may hold class weights
            return self.loss(model(*batch[:-1]), batch[-1])

    def _precision(self, device: str) -> AbstractContextManager[Any]:
        if self.autocast is None or device == "meta":
            return nullcontext()
        return torch.autocast(device, dtype=self.autocast)

    def __repr__(self) -> str:
        return f"adopted {getattr(self.loss, '__name__', type(self.loss).__name__)}"


def fitting(model: nn.Module, data: Examples | Whole, loss: Any, micros: int, autocast: torch.dtype | None) -> Loss:
    """Returns the loss, tried on a model copy and a first batch without random numbers. Raises KnobError."""
    device = next(model.parameters()).device
    tried = _copied(model).train()
    with Chance(0):
        batch = _first(data)
        part = _on(batch[0] if isinstance(batch, Micros) else batch, device)
        reasons = []
        for judges in (False, True):
            if isinstance(loss, nn.Module) and not judges:
                continue
            way = "of (output, target)" if judges else "of (model, batch)"
            try:
                found = Loss(loss, judges, 1, autocast)(tried, part)
            except Exception as error:
                reasons.append(f"{way} {type(error).__name__}: {error}")
                continue
            if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
                return Loss(loss, judges, micros, autocast)
            shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            reasons.append(f"{way} it is a {type(found).__name__}{shape}")
    told = "; ".join(" ".join(reason.split())[:200] for reason in reasons)
    raise KnobError(f"loss={Loss(loss, True, 1, None)!r}: must return a scalar that depends on the model, from (model, "
                    f"batch) or (output, target); {told}")  # fmt: skip


def _first(data: Examples | Whole) -> Any:
    try:
        if isinstance(data, Examples):
            return next(islice(data(0, 1, 0, data.batch), 1))
        return next(islice(data(0, 1, 0), 1))
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise KnobError(f"loader: its first batch cannot be read ({text}); give a loader that yields batches") from None


def _on(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: _on(x, device) for k, x in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(_on(x, device) for x in batch)
    return batch
