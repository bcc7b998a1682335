"""One rank of a run, as the parts of its loop see each other."""

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
    """A rank that makes steps, and goes on in a new generation. For the attributes see `ElasticMember`."""

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
        """Cuts buckets in the order of gradients, if a trial can foresee it."""

    async def agree_on_order(self, names: list[str]) -> list[str]:
        """Returns `names` of the first of the ranks that hold the same part of the model."""

    async def align_order(self) -> None:
        """Gives all ranks rank 0's order of parameters."""

    async def split_state(self, ahead: bool = False) -> None:
        """Splits state that is whole on every rank as the partition and the strategy need it."""

    async def confirm_formed(self) -> None:
        """Waits until every rank of the generation holds the full state."""

    async def run_steps(self) -> None:
        """Makes steps and evaluations until the run is over."""

    def set_phase(self, phase: str) -> None:
        """Records what the run does now, such as "running"."""
