"""A rank's view for checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.host.core.planned import Planned
from workbench.host.memory.batches import BatchReader, Numbers
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.transfer.views import ChangeView


class CheckpointerView(Protocol):
    """A rank's Checkpointer."""

    def end(self, patience: float | None = None) -> None:
        """As in Checkpointer."""


class CheckpointView(ChangeView, Protocol):
    """A checkpointed rank; see CheckpointableRank and RankLoop."""

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
        """Restores the states."""

    def restore_slice_rng(self, at: tuple[int, int] | None) -> None:
        """Restores `slice_rng`."""
