"""One rank of a run, as its checkpoints see it."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.host.memory.batches import Batches, Numbers
from workbench.host.observe.finite import Finite
from workbench.host.observe.measuring import Measuring
from workbench.host.reconfigure.steering import Steering
from workbench.host.transfer.views import Changing
from workbench.settings import Change


class Writing(Protocol):
    """What writes a rank's checkpoints."""

    def end(self, patience: float | None = None) -> None:
        """Waits until the present checkpoint is written, at most `patience` seconds."""


class CheckpointView(Changing, Protocol):
    """A rank whose state is saved and restored.

    planned:  future changes, in the order of their steps
    held_out: the last held-out loss that this rank knows
    draws:    the states of the random numbers of this rank's forwards
    crowd:    `at` of its passes' Together, if it has slices of the model
    apart:    whether ranks make steps without a meeting in every round
    """

    state: Any
    planned: list[Change]

    @property
    def held_out(self) -> float | None: ...
    @property
    def reads(self) -> Batches | None: ...
    @property
    def draws(self) -> Numbers | None: ...
    @property
    def crowd(self) -> tuple[int, int] | None: ...
    @property
    def apart(self) -> bool: ...
    @property
    def saving(self) -> Writing: ...
    @property
    def measuring(self) -> Measuring: ...
    @property
    def finite(self) -> Finite: ...
    @property
    def steering(self) -> Steering: ...

    def draw_on(self, states: Numbers | None) -> None:
        """Restores the states of random numbers."""

    def join_crowd(self, at: tuple[int, int] | None) -> None:
        """Restores `crowd`."""
