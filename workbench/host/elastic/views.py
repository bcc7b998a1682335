"""A rank's view between generations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.checkpoint.recovery import RecoveryCheckpoint
from workbench.host.core.planned import Planned
from workbench.host.core.rate import Rate
from workbench.host.elastic.rollback import Rollback
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.spread import ReplicaSpread
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.reconfigure.views import PolicyView
from workbench.host.transfer.boundary import Boundary
from workbench.host.transfer.views import ChangeView
from workbench.tasks import Learner


class SurvivorView(Protocol):
    """A remaining rank."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def learner(self) -> Learner: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Raises KnobError if this host cannot train `wanted`."""


class GenerationView(ChangeView, PolicyView, Protocol):
    """A rank that takes its state into the next generation.

    rate: the rate that the rank trains with
    obeyed, taken, made_changes, bounds, outer, former: as in `ElasticMember` (`host/loop/elastic_member.py`)
    """

    spread: ReplicaSpread | None
    rate: Rate
    obeyed: int
    taken: list[Planned]
    made_changes: Sequence[Planned | None]
    bounds: list[Boundary]
    outer: dict[str, Tensor] | None
    former: RecoveryCheckpoint | None

    @property
    def rollback(self) -> Rollback | None: ...
    @property
    def reads(self) -> BatchReader | None: ...
    @property
    def steering(self) -> PolicyRunner: ...

    def replan_changes(self, changes: int) -> None:
        """As in ElasticMember."""

    def resize_own_buckets(self, bucket_mb: float) -> None:
        """Only between 2 generations."""

    def release_state(self, seed: int) -> None:
        """As in ElasticMember."""

    def reallocate_state(self) -> None:
        """As in ElasticMember."""
