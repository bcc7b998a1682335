"""Parts that a rank's performers share: tensors or sizes, guards and accounts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.host.elastic.rollback import Rollback
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.passes.tensor_schedule import PassPlan, find_plans
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.unsharder import Unsharder
from workbench.rank import Rank

if TYPE_CHECKING:
    from workbench.sim.clock.world import VirtualWorld


@dataclass(eq=False, repr=False)
class ComputeParts:
    """Parts of one virtual rank.

    experiment: the settings in force
    body:       the rank's RankTensors or RankSizes
    usage:      which parameters steps use
    rollback:   None if no rank can be lost
    alone:      held while the ranks agree on the parameters that they used
    """

    world: VirtualWorld
    rank: Rank
    experiment: Experiment
    body: Any
    micros_in_flight: InFlight
    usage: ParameterUsage
    policy_runner: PolicyRunner
    rollback: Rollback | None
    submodel: SubModelTraining
    memory_account: MemoryAccount
    unsharder: Unsharder
    alone: AbstractContextManager[None] = field(default_factory=nullcontext)

    def __post_init__(self) -> None:
        self.clock, self.record = self.world.clock, self.world.record

    @property
    def layout(self) -> Any:
        return self.body.layout

    @property
    def optimizer(self) -> Any:
        return self.body.optimizer

    @property
    def model(self) -> Any:
        return self.body.model

    module = model  # no wrapper

    @property
    def pass_plans(self) -> tuple[PassPlan, ...]:
        """By piece of the model: when ranks meet in a pass, with the present batch size."""
        stage, stages = self.body.stage
        return find_plans(self.experiment, self.body.learner, self.body.split)[stage::stages]

    def strategy(self) -> Any:
        return self.experiment.strategy

    def span(self, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int, step: int = -1) -> None:
        """step: negative for the present step"""
        if lane == "compute" and self.policy_runner.names:
            self.policy_runner.receive_sample(lane, t1 - t0)
        rank = self.rank
        self.record.span(rank.id, rank.step if step < 0 else step, lane, name, asked, t0, t1, nbytes)

    def note(self, name: str, value: float) -> None:
        self.policy_runner.receive_sample(name, value)
        self.record.sample(self.rank.id, self.rank.step, name, self.clock.now, float(value))
