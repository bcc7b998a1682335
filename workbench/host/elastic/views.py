"""One rank of a run, as those see it who take it to its next generation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.elastic.rollback import Rollback
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.spread import ReplicaSpread
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.reconfigure.views import PolicyView
from workbench.host.transfer.boundary import Boundary
from workbench.host.transfer.views import ChangeView
from workbench.tasks import Learner


class SurvivorView(Protocol):
    """A rank that is left, for the decision how the run goes on."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def learner(self) -> Learner: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this host cannot train it."""


class GenerationView(ChangeView, PolicyView, Protocol):
    """A rank that leaves a generation, and takes its state into the next.

    bounds, outer: as in `ElasticMember` (`host/loop/elastic_member.py`)
    """

    spread: ReplicaSpread | None
    bounds: list[Boundary]
    outer: dict[str, Tensor] | None

    @property
    def rollback(self) -> Rollback | None: ...
    @property
    def reads(self) -> BatchReader | None: ...
    @property
    def steering(self) -> PolicyRunner: ...

    def replan_changes(self, changes: int) -> None:
        """Makes `changes` the number of made changes."""

    def resize_own_buckets(self, bucket_mb: float) -> None:
        """Cuts buckets of another size, between 2 generations."""

    def release_state(self, seed: int) -> None:
        """Drops this rank's part of the model and its placement. Seeds the random numbers with `seed`."""

    def reallocate_state(self) -> None:
        """Puts the whole model, which has memory again, into buckets, and makes its optimizer."""
