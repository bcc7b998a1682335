"""Compares a member of a family with the usual member on the simulator, for lessons."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from workbench.compressors import Compressor, Dense, TopK
from workbench.experiment import Experiment
from workbench.experiment.recipes import recipe
from workbench.fabric import Algorithm, Fault
from workbench.fabric.algorithms.native import Native
from workbench.optimizers import SGD, Optimizer
from workbench.partitions import Partition, Pipeline, Whole
from workbench.partitions.schedules import Schedule
from workbench.partitions.schedules.gpipe import GPipe
from workbench.policies import ByHand, Policy, PolicyBase
from workbench.record.run import Run
from workbench.settings import KnobError, members, short
from workbench.sim.run.simulate import simulate
from workbench.strategies import DDP, Strategy

COMPARED_STEPS = 24
LEARNING_STEPS = 60  # of comparisons by loss


@dataclass(frozen=True)
class FamilyPlace:
    """A family's place in an experiment.

    path: where members go; usual: the member to compare with; view: shows the difference
    experiments: the first one that a member does not refuse is simulated
    """

    family: type[Any]
    path: str
    usual: Any
    view: str
    experiments: tuple[Experiment, ...]

    def insert_member(self, experiment: Experiment, value: Any) -> Experiment:
        return experiment.set(self.path, (value,) if isinstance(value, Fault) else value)


@dataclass(frozen=True)
class MemberComparison:
    """Two simulated runs that differ at `path`: with the usual member, and with the shown one."""

    path: str
    usual: Run
    shown: Run
    view: str


def list_places() -> Iterator[FamilyPlace]:
    """Yields the families that a simulated run can show."""
    first = recipe("first_run").set("steps", COMPARED_STEPS).set("eval_every", 0)
    clicks = recipe("clicks").set("compressor", Dense()).set("steps", COMPARED_STEPS).set("eval_every", 0)
    plain = first.set("optimizer", SGD())  # some strategies and compressors have their own momentum
    stages = first.set("partition", Pipeline(stages=4))
    learns = recipe("digits").set("pace", 10).set("steps", LEARNING_STEPS)
    yield FamilyPlace(Strategy, "strategy", DDP(), "timeline", (first, plain, clicks))
    yield FamilyPlace(Compressor, "compressor", Dense(), "timeline", (first, plain, clicks))
    yield FamilyPlace(Partition, "partition", Whole(), "timeline", (first,))
    staged = (stages, stages.set("partition.stages", 2), stages.set("partition.micros", 1))
    yield FamilyPlace(Schedule, "partition.schedule", GPipe(), "timeline", staged)
    yield FamilyPlace(Algorithm, "fabric.algorithm", Native(), "timeline", (first,))
    yield FamilyPlace(Fault, "fabric.faults", (), "timeline", (first,))
    yield FamilyPlace(Optimizer, "optimizer", SGD(), "loss", (learns,))
    steered = (learns, learns.set("strategy", "LocalSGD"), learns.set("compressor", "TopK"))
    yield FamilyPlace(PolicyBase, "policy", ByHand(), "loss", steered)


def find_member(member: type[Any] | str) -> type[Any]:
    """member: a class or its name. Raises KnobError if no family has it."""
    every = {name: kind for place in list_places() for name, kind in members(place.family).items()}
    if isinstance(member, type) and any(issubclass(member, place.family) for place in list_places()):
        return member
    if isinstance(member, str) and member in every:
        return every[member]
    near = difflib.get_close_matches(str(member), every, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "take a class such as LocalSGD, TopK or Pipeline, or its name"
    raise KnobError(f"member={short(member)}: no strategy, compressor or other member of a family; {hint}")


def compare_member(member: type[Any]) -> MemberComparison:
    """Simulates `member` with its defaults, and the usual member. Raises KnobError if all experiments refuse it."""
    place = next(p for p in list_places() if issubclass(find_member(member), p.family))
    refusals = []
    for experiment in place.experiments:
        try:
            shown = place.insert_member(experiment, _wrap_telling(member.usual()))
            if why := explain_idle(shown, member):
                raise KnobError(why)
            real = place.view == "loss"
            usual = simulate(place.insert_member(experiment, place.usual), real=real)
            return MemberComparison(place.path, usual, simulate(shown, real=real), place.view)
        except KnobError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _wrap_telling(made: Any) -> Any:
    """Replaces Dense inside a compressor by TopK, because around Dense the compressor changes nothing."""
    return replace(made, of=TopK()) if isinstance(getattr(made, "of", None), Dense) else made


def explain_idle(experiment: Experiment, member: type[Any]) -> str | None:
    """Returns why a policy has nothing to decide in this experiment; None for other members."""
    policy = experiment.policy
    return policy.needs(experiment.checked()) if issubclass(member, Policy) and isinstance(policy, Policy) else None
