"""Finds (strategy, partition) pairs that fit into memory, and predicts their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from workbench import analysis
from workbench.analysis.steps.words import format_seconds
from workbench.experiment import Experiment, user_input
from workbench.fabric.pace import SHARES
from workbench.host.core.valueless import make_outline
from workbench.host.memory.budget import OutOfMemory
from workbench.host.placement.replica_spread import find_spread
from workbench.partitions import Partition, Whole
from workbench.policies import ByHand
from workbench.settings import KnobError, knobs, members
from workbench.settings.progress import doing
from workbench.sim.costs.costs import Costs
from workbench.sim.costs.even_ranks import explain_unlike
from workbench.sim.run.memory_checks import MAX_ROUND_STEPS, longest_round, require_room
from workbench.sim.run.simulate import simulate_sizes
from workbench.tasks import Learner

MAX_REASONS = 3  # in an error
MAX_UNEVEN_RANKS = 64  # up to which each has its own speed
UNTYPICAL_STEPS, MIN_STEPS = 3, 2  # first steps; measured steps, at least


class PlannedPair(NamedTuple):
    """A pair with its prediction for one global batch.

    strategy, partition: the pair
    step_s: seconds per step
    peak:   bytes on the fullest device
    sent:   bytes per rank and step
    away:   bytes that a rank keeps on its host or disk
    """

    strategy: Any
    partition: Partition
    step_s: float
    peak: int
    sent: float
    away: int = 0

    def __repr__(self) -> str:
        away = f", {analysis.format_bytes(self.away)} away from it" if self.away else ""
        return (
            f"{_describe_member(self.strategy)}, {_describe_member(self.partition)}: {format_seconds(self.step_s)} a "
            f"step, {analysis.format_bytes(self.peak)} on the device{away}, {analysis.format_bytes(self.sent)} sent"
        )


def _describe_member(member: Any) -> str:
    """Returns a member as code, without default knobs."""
    usual = {knob.name: knob.default for knob in knobs(type(member))}
    turned = [(k.name, k.default) for k in knobs(member) if k.default != usual[k.name]]
    said = ", ".join(
        f"{name}={_describe_member(value) if hasattr(value, 'home') else repr(value)}" for name, value in turned
    )
    return f"{type(member).__name__}({said})"


def plan(experiment: Experiment, *, costs: Costs | None = None, strategies: Iterable[Any] = (),
         partitions: Iterable[Partition] = ()) -> list[PlannedPair]:  # fmt: skip
    """Returns the pairs that `experiment`'s ranks can train with in `memory_mb`, fastest first.

    Simulates a few steps of each pair, with sizes only. The global batch is the same: a replica on n ranks takes n
    times the batch of one rank. If replicas behave alike, one stands for all (`simulate(alike=True)`). Above
    `MAX_UNEVEN_RANKS` ranks, each rank is as fast as the slowest is expected to be (`Costs.even`).

    costs:      compute times (`Costs.measured(run)`), if `experiment` has no `pace`: of one replica's batch on one rank
    strategies: by default the exact ones, and the experiment's own
    partitions: by default the whole model with and without checkpointing, and up to 64 stages or slices that divide the
                number of ranks

    Raises KnobError if no compute time is known. Raises KnobError with the reasons if no pair is left.
    """
    e = user_input.experiment(experiment).checked()
    if not e.pace and costs is None:
        raise KnobError(
            "pace=0: the duration of compute is unknown; give costs=Costs.measured(run), or an experiment with a pace"
        )
    costs = (costs or Costs()).at_least({phase: e.pace * 1e-3 * share for phase, share in SHARES.items()})
    costs = costs.even(e.ranks) if e.ranks > MAX_UNEVEN_RANKS else costs
    learner, why = e.task.build(), list[str]()
    ways = _list_possible_partitions(e, list(partitions) or list(_list_partitions(e)), learner, why)
    found, seen = list[PlannedPair](), dict[Any, Any]()  # seen: passes that pairs share
    pairs = list(product(list(strategies) or _list_exact_strategies(e), ways))
    with doing("planning", len(pairs)) as work:
        for strategy, way in pairs:
            once: tuple[Any, Any] = (learner, seen) if learner.pure else (e.task.build(), None)
            row = _simulate_pair(e, strategy, way, costs, *once)
            found.append(row) if isinstance(row, PlannedPair) else why.append(row)
            work.step()
    if not found:
        raise KnobError(_describe_refusals(why))
    return sorted(found, key=lambda row: (row.step_s, row.peak))


def _describe_refusals(why: list[str]) -> str:
    """Returns the number of refusals and the most frequent reasons."""
    reasons = [reason for reason, _ in Counter(why).most_common(MAX_REASONS)]
    more = f"; and {len(set(why)) - len(reasons)} other reasons" if len(set(why)) > len(reasons) else ""
    return f"plan: no strategy and partition can train this experiment ({len(why)} refused): {'; '.join(reasons)}{more}"


def _list_possible_partitions(
    e: Experiment, ways: list[Partition], learner: Learner, why: list[str]
) -> list[Partition]:
    """Returns the partitions that can cut the model. Appends reasons against other partitions to `why`."""
    model, found = make_outline(learner), []
    for way in ways:
        try:
            find_spread(replace(e, partition=way, batch=e.batch * way.size), model, learner)
            found.append(way)
        except KnobError as error:
            why.append(f"{_describe_member(way)}: {error}")
    return found


def _simulate_pair(e: Experiment, strategy: Any, way: Partition, costs: Costs, learner: Learner,
               seen: dict[Any, Any] | None) -> PlannedPair | str:  # fmt: skip
    """Returns a prediction, or the reason for a refusal."""
    looked = max(
        MIN_STEPS, min(longest_round(strategy), MAX_ROUND_STEPS) if strategy.periodic else 0
    )  # a whole round, if periodic
    never = way.depth if way.ahead(0) else 0  # unflushed: rounds until all wait for the slowest, and to drain
    stop = UNTYPICAL_STEPS * max(1, never) + max(looked, min(longest_round(strategy), MAX_ROUND_STEPS) + MIN_STEPS)
    steps = stop + never
    evaluates = steps if e.eval_every and e.memory_mb else 0  # once, to measure its memory
    try:
        e = replace(e, strategy=strategy, partition=way, steps=steps, eval_every=evaluates, batch=e.batch * way.size,
                    pace=0.0, policy=ByHand()).checked()  # fmt: skip
        costs = costs.scale_compute(way.size)
        run = simulate_sizes(e, learner, costs, explain_unlike(e, costs) is None, seen)
        held = analysis.measure_memory(run.timeline)
        if e.memory_mb:
            require_room(e, held)
    except (KnobError, OutOfMemory) as error:
        return f"{_describe_member(strategy)}, {_describe_member(way)}: {error}"
    times = analysis.step_times(run.timeline, looked, stop)
    away = max(m.most.get("on host", 0) + m.most.get("on disk", 0) for m in held)
    sent = float(analysis.bytes_per_step(run.timeline, stop - looked, stop).mean())
    return PlannedPair(e.strategy, e.partition, float(times.seconds.mean()), max(m.peak for m in held), sent, away)


def _list_exact_strategies(e: Experiment) -> list[Any]:
    """Returns the experiment's strategy, and exact strategies with default knobs."""
    from workbench.strategies import Strategy

    kinds: dict[str, Any] = members(Strategy)
    own = [cls for cls in kinds.values() if cls.__module__.startswith("workbench.")]
    shipped = [cls() for cls in own if cls.exact and not cls.opaque]
    return shipped if e.strategy in shipped or e.strategy.opaque else [*shipped, e.strategy]


def _list_partitions(e: Experiment) -> Iterator[Partition]:
    from workbench.partitions import Pipeline, Tensor

    yield Whole()
    yield Whole(checkpoint="units")
    divisors = [n for n in range(2, min(64, e.ranks) + 1) if e.ranks % n == 0]
    for n in divisors:
        yield Tensor(ways=n)
        micros = [m for m in range(n, 4 * n + 1) if e.batch * n % m == 0]
        if micros:
            yield Pipeline(stages=n, micros=micros[-1])
        for ways in divisors:
            micros = [m for m in range(n, 4 * n + 1) if e.batch * n * ways % m == 0]
            if e.ranks % (n * ways) == 0 and micros:
                yield Pipeline(stages=n, micros=micros[-1], of=Tensor(ways=ways))
