"""The whole contract of an optimizer as a choice, on one screen. No ranks and no record are known here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.settings import Family

Own = Callable[[float], torch.optim.Optimizer]  # lr -> the task's own optimizer; 0 leaves the rates it was made with


@dataclass(frozen=True, kw_only=True)
class Optimizer(Family):
    """How a rank's gradients become a step: knobs, and `make`, which gives the torch Optimizer that makes it.

    The knobs are live: after a change the optimizer is made anew and takes over what means the same (see `carry`).

    own:     what becomes of what each rank's remembers of a parameter, by the name under which torch's object has it or
             by a pattern, where ranks that trained apart agree: "mean" (of whole numbers the first rank's), or "drop",
             for which it is zero
    of_task: `make` gives the task's own, so that what it is shows only once there is a model
    """

    home: ClassVar[str] = "workbench.optimizers"
    own: ClassVar[dict[str, str]] = {"*": "mean"}
    of_task: ClassVar[bool] = False

    @abstractmethod
    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        """A torch Optimizer of `params`; at lr = 0 it has the rate of the task's own."""

    def refuses(self) -> str | None:
        """Why these knobs cannot be together, in a sentence that says what would do; or None."""
        return None


def built(wanted: Optimizer, own: Callable[[Iterable[Any], float], torch.optim.Optimizer], params: Iterable[Any],
          lr: float) -> torch.optim.Optimizer:  # fmt: skip
    """The optimizer that an experiment wants; `own` makes the task's."""
    trained = list(params)
    return wanted.make(trained, lr, lambda rate: own(trained, rate))


def chosen(lr: float, own: Own) -> float:
    """`lr`, or where it is 0 the rate of the first group of the task's own optimizer."""
    return lr or float(own(0.0).param_groups[0]["lr"])


def by_layers(params: list[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights, which are adapted layer by layer and decay, and biases and normalisations, which do not.

    A parameter of one dimension or none is taken for one of the latter.
    """
    weights = {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay, "adapt": True}
    rest = {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "adapt": False}
    return [group for group in (weights, rest) if group["params"]]
