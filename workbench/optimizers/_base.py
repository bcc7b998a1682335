"""The interface of an optimizer as a setting."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.settings import Family

Own = Callable[[float], torch.optim.Optimizer]  # lr -> the task's own optimizer; 0 keeps its rates


@dataclass(frozen=True, kw_only=True)
class Optimizer(Family):
    """An optimizer as a setting: knobs, and `make`, which returns the torch Optimizer.

    The knobs are live. After a change, a new torch Optimizer takes over the state with the same meaning (see `carry`).

    own:     how ranks that trained apart agree on optimizer state, by its name in torch's object or a pattern: "mean"
             (for integers the first rank's value), or "drop", which sets it to zero
    of_task: `make` returns the task's own, whose class is known only with a model
    params:  parameters, or groups of them as torch takes them
    lr:      the learning rate. 0: the rate of the task's own optimizer
    """

    home: ClassVar[str] = "workbench.optimizers"
    own: ClassVar[dict[str, str]] = {"*": "mean"}
    of_task: ClassVar[bool] = False

    @abstractmethod
    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        """Returns a torch Optimizer of `params`.

        own:  makes the task's own optimizer of these parameters at a given rate
        """

    def build(self, own: Callable[[Iterable[Any], float], torch.optim.Optimizer], params: Iterable[Any],
              lr: float) -> torch.optim.Optimizer:  # fmt: skip
        """Returns the result of `make` for these parameters.

        own:  makes the task's own optimizer of any parameters at a given rate
        """
        trained = list(params)
        return self.make(trained, lr, lambda rate: own(trained, rate))

    def refuses(self) -> str | None:
        """Returns why these knobs do not fit together, with a remedy; or None."""
        return None


def chosen(lr: float, own: Own) -> float:
    """Returns `lr`, or if it is 0 the first rate of the task's own optimizer."""
    return lr or float(own(0.0).param_groups[0]["lr"])


def by_layers(params: list[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups: weights, and biases with normalisations. The second has no trust ratio and decay.

    Parameters with at most one dimension belong to the second group.
    """
    weights = {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay, "adapt": True}
    rest = {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "adapt": False}
    return [group for group in (weights, rest) if group["params"]]
