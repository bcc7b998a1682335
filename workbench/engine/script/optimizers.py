"""A loop's optimizers and learning rate, as a rank sees them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from workbench.host.core.learning_rate import Rate
from workbench.tasks import rate


class ScriptLoopView(Protocol):
    """A loop with its optimizers."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    def run_update(self) -> None:
        """Runs the loop until it has updated."""


class ScriptOptimizer:
    """A loop's optimizers as one. Its step lets the loop step them."""

    def __init__(self, loop: ScriptLoopView) -> None:
        self._loop = loop
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies, because only the loop sets rates."""
        return [dict(group) for one in self._loop.optimizers for group in one.param_groups]

    @property
    def classes(self) -> list[type]:
        return [type(one) for one in self._loop.optimizers]

    @property
    def state(self) -> Any:
        found = [one.state for one in self._loop.optimizers]
        return found[0] if len(found) == 1 else {p: slots for state in found for p, slots in state.items()}

    def step(self) -> None:
        self._loop.run_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The loop clears its gradients."""


class ScriptRate(Rate):
    """The learning rate that a loop sets. The rank only reads it."""

    def compute_rate(self, run: Any, step: int | None = None) -> float:
        return rate(run.optimizer)


def list_params(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the ids of the parameters that it steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
