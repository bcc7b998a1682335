"""Finds the best cuts of a model into stages from the times of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from workbench import analysis
from workbench.analysis.steps.words import format_seconds
from workbench.experiment import Experiment, user_input
from workbench.fabric.load import stretch
from workbench.fabric.pace import SHARES
from workbench.host.core.valueless import make_outline
from workbench.host.observe.unit_times import TimedUnit, measure_outputs, measure_unit_times
from workbench.host.placement.balancing import IMPOSSIBLE, StageCut, find_pareto_cuts
from workbench.host.placement.stage_cuts import cut_model, estimate_compute, find_tied_and_untrained, list_parts
from workbench.partitions import Partition
from workbench.policies import ByHand
from workbench.record.run import Run
from workbench.settings import KnobError, fold
from workbench.settings.progress import doing
from workbench.sim.costs.costs import Costs
from workbench.sim.costs.durations import Duration
from workbench.sim.run.memory_checks import MAX_ROUND_STEPS, longest_round
from workbench.sim.run.simulate import simulate
from workbench.tasks import Learner

UNTYPICAL_STEPS, MEASURED_STEPS = 3, 2  # first steps; measured steps
SIMULATED_CUTS = 6  # cuts that are simulated


class CutPrediction(NamedTuple):
    """A way to cut a model.

    cuts: indices of the parts at which pieces begin; step_s: predicted seconds per step; bubble: idle share of stages
    """

    cuts: tuple[int, ...]
    step_s: float
    bubble: float

    def __repr__(self) -> str:
        return f"cuts={list(self.cuts)}: {format_seconds(self.step_s)} a step, stages idle {self.bubble:.0%}"


class BalanceProposal(NamedTuple):
    """The proposal of `balance`.

    partition: has the new cuts: `lab.set("partition", found.partition)` applies it live
    best:      its prediction
    even:      the prediction for cuts by numbers of parameters (None: impossible)
    units:     times of each part for one micro-batch
    costs:     the same times for `simulate` and `plan`, per batch of a replica
    exact:     whether all cuts were compared; several pieces per stage may allow too many
    """

    partition: Partition
    best: CutPrediction
    even: CutPrediction | None
    units: tuple[TimedUnit, ...]
    costs: Costs
    exact: bool = True

    @property
    def cuts(self) -> tuple[int, ...]:
        """The indices of the parts at which pieces begin."""
        return self.best.cuts

    @property
    def gain(self) -> float:
        """Step time with cuts by numbers of parameters, divided by the best."""
        return self.even.step_s / self.best.step_s if self.even else float("nan")

    def __repr__(self) -> str:
        even = f"; by numbers of parameters {self.even!r}, {self.gain:.2f} times as long" if self.even else ""
        some = "" if self.exact else "; of too many cuts the most promising were weighed"
        return "\n".join([f"{self.best!r}{even}{some}", *self._describe_parts()])

    def _describe_parts(self) -> Iterator[str]:
        stages = self.partition.depth
        for number, unit in enumerate(self.units):
            stage = sum(begin <= number for begin in self.cuts) % stages
            yield (f"  part {number:2d} on stage {stage}: forward {format_seconds(unit.forward)}, "
                   f"backward {format_seconds(unit.backward)}  {unit.name}")  # fmt: skip


def balance(experiment: Experiment, *, times: Sequence[tuple[float, float]] | None = None,
            slow: Sequence[float] | Run | None = None, rounds: int = 9) -> BalanceProposal:  # fmt: skip
    """Returns the fastest cuts of `experiment`'s pipeline.

    times:  seconds of a forward and a backward of one micro-batch through each part of the model. Default: medians of
            `rounds` measurements in this process on one thread. Under a `pace`, a part takes at least the pace's share
            for its parameters.
    slow:   by stage, the factor by which its ranks are slower, apart from `experiment`'s faults in the first step. Or a
            run with as many stages, which gives the factors including faults

    Two costs count: the slowest stage's time for all its pieces, and the time for which links are busy between pieces.
    `host/placement/balancing.py` finds the Pareto-optimal cuts. How much each cost matters depends on the schedule, so
    `simulate` predicts a step for SIMULATED_CUTS of these cuts and for cuts by numbers of parameters. Only this
    prediction includes a codec between stages. The optimizer's time does not count.

    Raises KnobError if the partition has no stages, or the model cannot be cut into so many.
    """
    e = user_input.experiment(experiment).checked()
    if rounds < 1:
        raise KnobError(f"rounds={rounds}: must be at least 1")
    way = e.partition
    if way.depth == 1:
        raise KnobError(
            f"partition={type(way).__name__}: only stages are balanced, and this has none; take partition=Pipeline()"
        )
    learner = e.task.build()
    model = make_outline(learner)
    parts, count = list_parts(model, learner), way.depth * way.pieces
    units = measure_unit_times(e, learner, rounds) if times is None else _read_part_times(times, len(parts))
    units = _apply_pace(e, units, [estimate_compute(part) for part in parts])
    if isinstance(slow, Run):
        e = replace(e, fabric=replace(e.fabric, faults=()))
    factors = (
        _measure_slow_factors(slow, e, units, model, learner)
        if isinstance(slow, Run)
        else _read_slow_factors(slow, way.depth)
    )
    rows = [[f * u.forward + b * u.backward for u in units] for f, b in _stage_slowness(e, factors)]
    try:
        ways, exact = find_pareto_cuts(
            rows, count, *find_tied_and_untrained(parts), way.depth, _crossing_seconds(e, learner)
        )
    except ValueError:
        cut_model(e, model, learner)  # raises a more precise error
        raise KnobError(
            f"partition={type(way).__name__}: the model's {len(parts)} parts cannot be cut into {count} pieces: "
            f"each needs trained parameters, none of them tied to another piece; take fewer"
        ) from None
    costs = _make_stage_costs(e, units, factors)
    bare = replace(way, cuts=())  # type: ignore[call-arg]
    try:
        even = _predict_cut(e, bare, cut_model(replace(e, partition=bare), model, learner).piece_starts, costs)
    except KnobError:
        even = None
    some, tried = _sample_ways(ways), []
    with doing("balancing", len(some)) as work:
        for w in some:
            tried.append(_predict_cut(e, replace(way, cuts=w.cuts), w.cuts, costs))  # type: ignore[call-arg]
            work.step()
    found = min([*tried, *([even] if even else [])], key=lambda each: each.step_s)
    return BalanceProposal(replace(way, cuts=found.cuts), found, even, units, costs, exact)  # type: ignore[call-arg]


def _sample_ways(ways: list[StageCut]) -> list[StageCut]:
    last = len(ways) - 1
    return [ways[at] for at in sorted({round(k * last / (SIMULATED_CUTS - 1)) for k in range(SIMULATED_CUTS)})]


def _crossing_seconds(e: Experiment, learner: Learner) -> list[list[float]]:
    """Returns (stages, parts): seconds per micro-batch that links are busy if a piece begins at a part."""
    way = e.partition
    if not e.fabric.shaped:
        return [[]]
    sizes, slices = measure_outputs(e, learner), way.size // way.depth
    firsts = [stage * slices for stage in range(way.depth)]
    links = [e.fabric.path(sorted((firsts[stage - 1], first))) for stage, first in enumerate(firsts)]
    return [[0.0, *(2 * link.seconds(nbytes, 1) for nbytes in sizes)] for link in links]


def _read_part_times(times: Sequence[tuple[float, float]], count: int) -> tuple[TimedUnit, ...]:
    try:
        found = tuple(TimedUnit("", float(there), float(back)) for there, back in times)
    except (TypeError, ValueError):
        raise KnobError(f"times={times!r}: must be pairs of seconds, such as [(0.01, 0.02), (0.01, 0.03)]") from None
    if not all(0 <= seconds < IMPOSSIBLE for unit in found for seconds in unit[1:]) or not any(
        u.forward for u in found
    ):
        raise KnobError(f"times={times!r}: seconds must not be negative, and some must be above 0")
    if len(found) != count:
        raise KnobError(f"times: has {len(found)} parts, but the model has {count}; give a pair for each")
    return found


def _read_slow_factors(slow: Sequence[float] | None, depth: int) -> tuple[float, ...]:
    try:
        found = (1.0,) * depth if slow is None else tuple(map(float, slow))
    except (TypeError, ValueError):
        found = ()
    if len(found) != depth or not all(0 < factor < IMPOSSIBLE for factor in found):
        raise KnobError(f"slow={slow!r}: must be {depth} positive numbers, one for each stage")
    return found


def _measure_slow_factors(
    run: Run, e: Experiment, units: tuple[TimedUnit, ...], model: Any, learner: Any
) -> tuple[float, ...]:
    """Returns by stage: its slowest rank's time for equal parts, divided by the fastest stage's."""
    was, found = (
        fold(run.experiment, run.changes, Experiment.set)[-1][1].partition,
        analysis.measure_bubble(run.timeline),
    )
    if found is None or was.depth != e.partition.depth:
        raise KnobError(
            f"slow={run.name}: its last steps do not have {e.partition.depth} stages; take a run with so many"
        )
    stages = cut_model(replace(e, partition=was), model, learner)
    ends = [0, *stages.piece_starts, len(units)]
    pieces = [sum(u.forward + u.backward for u in units[a:b]) for a, b in pairwise(ends)]
    took = found.busy.reshape(-1, was.depth, found.slices).max(axis=(0, 2))
    times = [float(seconds) / max(sum(pieces[k :: was.depth]), 1e-12) for k, seconds in enumerate(took)]
    return tuple(each / min(times) for each in times)


def _find_stage(way: Partition, rank: int) -> int:
    return rank % way.size // (way.size // way.depth)


def _apply_pace(e: Experiment, units: tuple[TimedUnit, ...], weights: Sequence[int]) -> tuple[TimedUnit, ...]:
    each = [e.pace * 1e-3 * w / sum(weights) / e.partition.micro_batches for w in weights]
    return tuple(TimedUnit(u.name, max(u.forward, SHARES["forward"] * s), max(u.backward, SHARES["backward"] * s))
                 for u, s in zip(units, each, strict=True))  # fmt: skip


def _stage_slowness(e: Experiment, factors: tuple[float, ...]) -> list[tuple[float, float]]:
    """Returns by stage the factors by which forward and backward are slower on its slowest rank."""
    found = [(factor, factor) for factor in factors]
    faults = e.fabric.faults
    return [(max(f * stretch(faults, r, 0, "forward") for r in range(e.ranks) if _find_stage(e.partition, r) == stage),
             max(b * stretch(faults, r, 0, "backward") for r in range(e.ranks) if _find_stage(e.partition, r) == stage))
            for stage, (f, b) in enumerate(found)]  # fmt: skip


def _make_stage_costs(e: Experiment, units: tuple[TimedUnit, ...], factors: tuple[float, ...]) -> Costs:
    """Returns each rank's costs for a replica's batch."""
    slow = [e.partition.micro_batches * factors[_find_stage(e.partition, rank)] for rank in range(e.ranks)]
    return Costs(forward=tuple(Duration(f * sum(u.forward for u in units)) for f in slow),
                 backward=tuple(Duration(f * sum(u.backward for u in units)) for f in slow),
                 parts=tuple((u.forward, u.backward) for u in units))  # fmt: skip


def _predict_cut(e: Experiment, way: Partition, cuts: tuple[int, ...], costs: Costs) -> CutPrediction:
    """Predicts steps without a memory limit."""
    looked = max(MEASURED_STEPS, min(longest_round(e.strategy), MAX_ROUND_STEPS) if e.strategy.periodic else 0)
    never = way.depth if way.ahead(0) else 0  # unflushed: rounds until all wait for the slowest, and to drain
    stop = UNTYPICAL_STEPS * max(1, never) + looked
    short = replace(e, partition=way, steps=stop + never, eval_every=0, memory_mb=0.0, policy=ByHand())
    run = simulate(short, costs=costs)
    found = analysis.measure_bubble(run.timeline, looked, stop)
    assert found is not None
    return CutPrediction(cuts, float(analysis.step_times(run.timeline, looked, stop).seconds.mean()), found.share)
