"""A rank, as the functions of its loop see it."""

from __future__ import annotations

from typing import Protocol

from workbench.host.checkpoint.checkpointer import Checkpointer
from workbench.host.elastic.carried_state import CarriedState
from workbench.host.memory.batches import BatchReader
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.transfer.change_view import ChangeView


class BucketOrderView(ChangeView, Protocol):
    """A rank that orders its buckets."""

    @property
    def checkpointer(self) -> Checkpointer: ...

    async def agree_on_order(self, names: list[str]) -> list[str]:
        """Returns `names` of the first rank that holds the same part of the model."""


class EnteringView(ChangeView, Protocol):
    """A rank that enters a new generation. It is a LoopView, too."""

    carried: CarriedState

    @property
    def checkpointer(self) -> Checkpointer: ...
    @property
    def non_finite_guard(self) -> NonFiniteGuard: ...
    @property
    def reads(self) -> BatchReader | None: ...
    @property
    def policy_runner(self) -> PolicyRunner: ...

    async def agree_on_order(self, names: list[str]) -> list[str]: ...

    def take_carried(self) -> CarriedState:
        """As in RankLoop."""

    async def confirm_formed(self) -> None:
        """Waits until every rank holds the full state. If one does not, no generation forms."""

    async def run_steps(self) -> None: ...
    def set_phase(self, phase: str) -> None:
        """For example "running"."""
