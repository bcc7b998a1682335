"""The optimizer that the task brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.optimizers._base import Optimizer, Own


@dataclass(frozen=True, kw_only=True)
class TaskOwn(Optimizer):
    """The optimizer that the task brings, with the settings it brings: AdamW for ByteGPT, Adam for Digits.

    When to use it: unless the optimizer is what you want to look at. Of your own `Task` only this one keeps
    several groups of parameters with settings of their own.
    """

    of_task: ClassVar[bool] = True

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        return own(lr)
