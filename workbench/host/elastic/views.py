"""One rank of a run, as those see it who take it to its next generation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.elastic.rollback import Rollback
from workbench.host.memory.batches import Batches
from workbench.host.placement.spread import Spread
from workbench.host.reconfigure.steering import Steering
from workbench.host.reconfigure.views import PolicyView
from workbench.host.transfer.boundary import Boundary
from workbench.host.transfer.views import Changing
from workbench.tasks import Learner


class SurvivorView(Protocol):
    """A rank that is left, for the decision how the run goes on."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def learner(self) -> Learner: ...

    def able(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this host cannot train it."""


class GenerationView(Changing, PolicyView, Protocol):
    """A rank that leaves a generation, and takes its state into the next.

    bounds, outer: as in `Outliving` (`host/loop/outliving.py`)
    """

    spread: Spread | None
    bounds: list[Boundary]
    outer: dict[str, Tensor] | None

    @property
    def rollback(self) -> Rollback | None: ...
    @property
    def reads(self) -> Batches | None: ...
    @property
    def steering(self) -> Steering: ...

    def plan_again(self, changes: int) -> None:
        """Makes `changes` the number of made changes."""

    def cut_anew(self, bucket_mb: float) -> None:
        """Cuts buckets of another size, between 2 generations."""

    def lie_bare(self, seed: int) -> None:
        """Drops this rank's part of the model and its placement. Seeds the random numbers with `seed`."""

    def lie_anew(self) -> None:
        """Puts the whole model, which has memory again, into buckets, and makes its optimizer."""
