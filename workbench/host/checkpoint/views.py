"""One rank of a run, as its checkpoints see it."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.host.core.planned import Planned
from workbench.host.memory.batches import BatchReader, Numbers
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.transfer.views import ChangeView


class CheckpointerView(Protocol):
    """What writes a rank's checkpoints."""

    def end(self, patience: float | None = None) -> None:
        """Waits until the present checkpoint is written, at most `patience` seconds."""


class CheckpointView(ChangeView, Protocol):
    """A rank whose state is saved and restored.

    planned:         future changes, in the order of their steps
    held_out:        the last held-out loss that this rank knows
    rng_states:      the states of the random numbers of this rank's forwards
    crowd:           `at` of its TensorParallelGroup, if it has slices of the model
    is_asynchronous: whether ranks make steps without a meeting in every round
    """

    state: Any
    planned: list[Planned]

    @property
    def held_out(self) -> float | None: ...
    @property
    def reads(self) -> BatchReader | None: ...
    @property
    def rng_states(self) -> Numbers | None: ...
    @property
    def slice_rng(self) -> tuple[int, int] | None: ...
    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def saving(self) -> CheckpointerView: ...
    @property
    def measuring(self) -> CompressionErrorProbe: ...
    @property
    def finite(self) -> NonFiniteGuard: ...
    @property
    def steering(self) -> PolicyRunner: ...

    def restore_rng(self, states: Numbers | None) -> None:
        """Restores the states of random numbers."""

    def restore_slice_rng(self, at: tuple[int, int] | None) -> None:
        """Restores `crowd`."""
