"""The optimizers and the rate of a loop of its own, as a rank that it leads reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workbench.host.core.rate import Rate
from workbench.tasks import rate

if TYPE_CHECKING:
    from workbench.engine.script.led import Led


class Theirs:
    """The optimizers of a loop as one, for who reads what they remember; a step of it is theirs, by the loop."""

    def __init__(self, led: Led) -> None:
        self._led = led
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies: rates are the loop's to set."""
        return [dict(group) for one in self._led.optimizers for group in one.param_groups]

    @property
    def classes(self) -> list[type]:
        """The class of each."""
        return [type(one) for one in self._led.optimizers]

    @property
    def state(self) -> Any:
        """By parameter, what is remembered of it."""
        found = [one.state for one in self._led.optimizers]
        return found[0] if len(found) == 1 else {p: slots for state in found for p, slots in state.items()}

    def step(self) -> None:
        self._led.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """That is the loop's to do."""


class TheirRate(Rate):
    """The learning rate where a loop sets it: it is read, and written down."""

    def due(self, run: Any, step: int | None = None) -> float:
        return rate(run.optimizer)


def held(optimizer: torch.optim.Optimizer) -> set[int]:
    """Which parameters it steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
