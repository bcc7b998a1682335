"""A rank's view between generations."""

from __future__ import annotations

from typing import Protocol

from workbench.experiment import Experiment
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.core.learning_rate import Rate
from workbench.host.elastic.carried_state import CarriedState
from workbench.host.elastic.rollback import Rollback
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.reconfigure.policy_view import PolicyView
from workbench.host.transfer.change_view import ChangeView
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

    rate, queue: restored if the generation does not form
    carried:     its own state between 2 generations
    """

    spread: ReplicaSpread | None
    rate: Rate
    queue: ChangeQueue
    carried: CarriedState

    @property
    def rollback(self) -> Rollback | None: ...
    @property
    def reads(self) -> BatchReader | None: ...
    @property
    def policy_runner(self) -> PolicyRunner: ...

    def resize_own_buckets(self, bucket_mb: float) -> None:
        """Only between 2 generations."""

    def release_state(self, seed: int) -> None:
        """Drops this rank's part of the model. Seeds the random numbers."""

    def reallocate_state(self) -> None:
        """Puts the whole model into buckets again, and makes its optimizer. Then no replica is spread."""
