"""Your own task from functions of a notebook, with checks that name each mistake."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.settings import KnobError
from workbench.tasks._base import Learner, TaskBase, TaskError, at_rate

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Task(TaskBase):
    """Your own model and data, as functions written in a notebook.

        Task(model=lambda: nn.Linear(4, 1),
             data=lambda rank, ranks, seed: [(x, y), ...],       # iterated again when it ends
             loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
             optimizer=lambda params: torch.optim.SGD(params, lr=0.1))

    model:      `() -> Module`, built on each rank from the same seed
    data:       `(rank, ranks, seed)` -> an iterable of batches: tensors, or tuples, lists and dicts of them. A list or
                a DataLoader starts over when it ends. If it also takes `batch`, it gets the examples per rank when the
                batch knob (or `batch`) is set. If it takes `used` too, its examples have an index and an order that
                depends on the seed alone. It then skips the `used` first examples, as `shuffled(n, rank, ranks, batch,
                seed, used)` does. So no example comes twice in an epoch, even if ranks die, join or leave
    loss:       `(model, batch)` -> scalar Tensor; it must not call `backward`
    optimizer:  `(params) -> Optimizer`; it keeps its own learning rates until the knob is set
    evaluate:   `(model)` -> held-out loss, or `{"loss": ..., "accuracy": ...}`. Without it the page shows no held-out
                loss
    parts:      `(model)` -> a list of Modules that hold the model's own parameters and compute it in sequence. A
                Pipeline may cut between them. A Sequential and transformers decoders built like Llama need none
    split:      `(model)` -> `{"blocks.*.up": Colwise(), "blocks.*.down": Rowwise()}`: how a Tensor partition splits
                layers. `*` stands for one part of a name. A model of transformers and a Sequential need none
    lookups:    `(batch)` -> `{"table.weight": ids}`: by name of each embedding's weight, the only rows that a batch
                reads. Strategies that keep embedding tables on servers need it
    pure:       the functions and the model keep no state between calls except parameters and buffers: no counter, no
                cached mask, no data that can be read only once. Then buckets follow the order of the gradients from the
                first step on, else from the second
    schedule:   `(step)` -> the factor of that step's learning rate; without it `lr` and `lr_warmup` set the rate
    keeps:      whether the run's end saves a checkpoint for `run.model()`; not if ranks end at different steps

    `workbench.adopt(model, optimizer, loader, loss)` makes a Task of a script's own objects.

    When to use it: for a model, data or a loss of your own.
    """

    model: Function
    data: Function
    loss: Function
    optimizer: Function
    evaluate: Function | None = None
    parts: Function | None = None
    split: Function | None = None
    lookups: Function | None = None
    pure: bool = False
    schedule: Function | None = None
    keeps: bool = False  # type: ignore[misc]

    lr: ClassVar[float] = 0.0

    @property
    def batch(self) -> int:  # type: ignore[override]
        """The preferred batch size of data with batches of any size; else 0."""
        return int(getattr(self.data, "batch", 0))

    @property
    def looks_up(self) -> bool:  # type: ignore[override]
        """Whether it declares which rows of embedding tables a batch reads."""
        return self.lookups is not None

    @classmethod
    def usual(cls) -> Task:
        """Raises KnobError, because a Task needs your own functions."""
        raise KnobError("task='Task': needs your own functions; give Task(model=..., data=..., loss=..., ...)")

    def build(self) -> Learner:
        """Returns its functions for the ranks. Raises TaskError if one of the required ones is no function."""
        for name in ("model", "data", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise TaskError(f"{name}={getattr(self, name)!r}: must be a function (a record keeps only its name)")
        return Learner(
            model=self._model, data=self._data, loss=self._loss, optimizer=self._optimizer,
            evaluate=self._evaluate if self.evaluate else None, parts=self._parts if self.parts else None,
            split=self._split if self.split else None, lookups=self._lookups if self.lookups else None,
            indexed=_takes(self.data, "used"), pure=self.pure,
            schedule=self._schedule if self.schedule else None,
        )  # fmt: skip

    def refuses(self, batch: int) -> str | None:
        """Returns why it cannot take a batch of this size, with a remedy; or None.

        batch:  examples per rank. 0: the task's own
        """
        batch = batch or self.batch
        if callable(own := getattr(self.data, "refuses", None)) and (reason := own(batch)):
            return str(reason)
        if _takes(self.data, "used") and not (batch and _takes(self.data, "batch")):
            return (
                f"batch={batch}: this task's data takes `used`, which counts examples; let it take (rank, ranks, seed, "
                f"batch, used), and set batch to the examples per rank, such as 32"
            )
        if not batch or _takes(self.data, "batch"):
            return None
        return f"batch={batch}: this task's data makes its own batches; let data take (rank, ranks, seed, batch)"

    def _model(self) -> Any:
        from torch import nn

        model = self.model()
        if not isinstance(model, nn.Module):
            raise TaskError(f"model() returned {_kind(model)}: must return a torch.nn.Module")
        if not any(p.requires_grad for p in model.parameters()):
            raise TaskError(f"model() returned {_kind(model)} with no parameters that learn: nothing can be trained")
        return model

    def _data(self, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterable[Any]:
        if reason := self.refuses(batch):
            raise KnobError(reason)
        given = {"batch": batch, "used": used} if batch else {}
        more = {name: value for name, value in given.items() if _takes(self.data, name)}
        made = self.data(rank, ranks, seed, **more)
        if not isinstance(made, Iterable):
            raise TaskError(f"data(...) returned {_kind(made)}: must return an iterable of batches, such as a list")
        return made

    def _loss(self, model: Any, batch: Any) -> Any:
        import torch

        loss = self.loss(model, batch)
        if not isinstance(loss, torch.Tensor):
            raise TaskError(f"loss(model, batch) returned {_kind(loss)}: must return a scalar Tensor")
        if loss.numel() != 1:
            raise TaskError(f"loss(model, batch) has shape {tuple(loss.shape)}: must be a scalar; take its mean()")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise TaskError("loss(model, batch) does not depend on the model's parameters: was it detached?")
        return loss.reshape(())

    def _optimizer(self, params: Iterable[Any], lr: float) -> Any:
        from torch.optim import Optimizer

        made = self.optimizer(params)
        if not isinstance(made, Optimizer):
            raise TaskError(f"optimizer(params) returned {_kind(made)}: must return a torch.optim.Optimizer")
        if lr:
            at_rate(made, lr)
        return made

    def _schedule(self, step: int) -> float:
        assert self.schedule is not None
        found = self.schedule(step)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
            raise TaskError(f"schedule({step}) returned {found!r}: must return a number that is not negative")
        return float(found)

    def _evaluate(self, model: Any) -> float | dict[str, float]:
        assert self.evaluate is not None
        found = self.evaluate(model)
        if isinstance(found, dict):
            if "loss" not in found:
                raise TaskError(f"evaluate(model) returned {', '.join(map(str, found))}: must also return 'loss'")
            return {str(k): float(v) for k, v in found.items()}
        try:
            return float(found)
        except (TypeError, ValueError):
            reason = f"evaluate(model) returned {_kind(found)}: must return a number, or a dict with 'loss'"
            raise TaskError(reason) from None

    def _parts(self, model: Any) -> Any:
        from torch import nn

        assert self.parts is not None
        found = self.parts(model)
        if not isinstance(found, list | tuple | nn.ModuleList) or not all(isinstance(p, nn.Module) for p in found):
            raise TaskError(f"parts(model) returned {_kind(found)}: must return a list of torch.nn.Modules")
        return list(found)

    def _split(self, model: Any) -> Any:
        assert self.split is not None
        found = self.split(model)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise TaskError(
                f"split(model) returned {_kind(found)}: must return a dict of modules' names and Colwise() or Rowwise()"
            )
        return dict(found)

    def _lookups(self, batch: Any) -> Any:
        import torch

        assert self.lookups is not None
        found = self.lookups(batch)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise TaskError(f"lookups(batch) returned {_kind(found)}: must return a dict of weights' names and rows")
        for name, rows in found.items():
            if not isinstance(rows, torch.Tensor) or rows.dtype not in (torch.int32, torch.int64):
                raise TaskError(f"lookups(batch)[{name!r}] is {_kind(rows)}: must be a tensor of whole numbers")
        return dict(found)


def _takes(data: Function, name: str) -> bool:
    try:
        return name in inspect.signature(data).parameters
    except (TypeError, ValueError):
        return False


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
