"""TaskOwn: the task's own optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.optimizers._base import Optimizer, Own


@dataclass(frozen=True, kw_only=True)
class TaskOwn(Optimizer):
    """The task's own optimizer with its own settings: AdamW for ByteGPT, Adam for Digits.

    When to use it: unless you want to study the optimizer. For a `Task` of your own, only TaskOwn keeps several
    parameter groups with different settings.
    """

    of_task: ClassVar[bool] = True

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        return own(lr)
