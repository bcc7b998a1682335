"""A rank's view within its loop."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workbench.host.checkpoint.recovery import RecoveryCheckpoint
from workbench.host.checkpoint.saving import Checkpointer
from workbench.host.core.planned import Planned
from workbench.host.memory.batches import BatchReader
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.transfer.boundary import Boundary
from workbench.host.transfer.views import ChangeView


class LoopView(ChangeView, Protocol):
    """A rank that makes steps; see `ElasticMember`."""

    planned: list[Planned]
    taken: list[Planned]
    bounds: list[Boundary]
    outer: dict[str, Tensor] | None
    former: RecoveryCheckpoint | None
    obeyed: int

    @property
    def saving(self) -> Checkpointer: ...
    @property
    def finite(self) -> NonFiniteGuard: ...
    @property
    def reads(self) -> BatchReader | None: ...
    @property
    def steering(self) -> PolicyRunner: ...

    async def foresee_order(self) -> None:
        """As in BucketOrdering."""

    async def agree_on_order(self, names: list[str]) -> list[str]:
        """As in BucketOrdering."""

    async def align_order(self) -> None:
        """As in ElasticMember."""

    async def split_state(self, ahead: bool = False) -> None:
        """As in BucketOrdering."""

    async def confirm_formed(self) -> None:
        """As in ElasticMember."""

    async def run_steps(self) -> None:
        """As in RankLoop."""

    def set_phase(self, phase: str) -> None:
        """For example "running"."""
