"""A rank's view for checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.host.core.change_queue import ChangeQueue
from workbench.host.memory.batches import BatchReader, Numbers
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.transfer.change_view import ChangeView


class CheckpointerView(Protocol):
    """A rank's Checkpointer."""

    def end(self, patience: float | None = None) -> None: ...


class CheckpointView(ChangeView, Protocol):
    """A rank with saved state.

    held_out:        the last held-out loss that this rank knows
    rng_states:      the random states of this rank's forwards
    slice_rng:       `random_position` of its TensorParallelGroup
    is_asynchronous: see `is_apart`
    """

    state: Any

    @property
    def queue(self) -> ChangeQueue: ...
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
    def checkpointer(self) -> CheckpointerView: ...
    @property
    def error_probe(self) -> CompressionErrorProbe: ...
    @property
    def non_finite_guard(self) -> NonFiniteGuard: ...
    @property
    def policy_runner(self) -> PolicyRunner: ...

    def restore_rng(self, states: Numbers | None) -> None: ...
    def restore_slice_rng(self, at: tuple[int, int] | None) -> None: ...
