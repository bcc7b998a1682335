"""Simulates a run's present and other settings, with costs measured from the run.

run.what_if({"ranks": 16, "link.bandwidth": 100})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench import analysis
from workbench.analysis.steps.words import format_seconds
from workbench.experiment import Experiment, user_input
from workbench.fabric.networks import network as found
from workbench.policies import ByHand
from workbench.settings import KnobError, fold, short
from workbench.settings.progress import doing
from workbench.sim import Costs, simulate
from workbench.sim.plan.quick_simulator import MAX_UNEVEN_RANKS, QuickSimulator, mean_seconds, mean_sent_bytes
from workbench.sim.plan.scaling import RANK_COUNTS, Scaling, list_assumptions, make_scaling_row

if TYPE_CHECKING:
    from workbench.record.run import Run

MIN_STEPS = 40  # measured and simulated steps, at least
MIN_ROUNDS = 4  # of a periodic strategy, at least
UNTYPICAL_STEPS = 2  # after a change or at the beginning


class WhatIf(NamedTuple):
    """Mean seconds per step: measured, simulated with the same settings and with other settings.

    measured:    in the run
    same:        simulated with the run's settings
    other:       simulated with the other settings
    experiment, run, sent: of the other settings; run: simulated; sent: bytes per step and rank
    assumptions: sentences about the simulation
    """

    measured: float
    same: float
    other: float
    experiment: Experiment
    run: Run
    sent: float
    assumptions: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Simulation error for the same settings, as a share of the measured time."""
        return self.same / self.measured - 1.0

    def __repr__(self) -> str:
        return (
            f"measured {format_seconds(self.measured)} per step; simulated {format_seconds(self.same)} "
            f"({self.error:+.0%} of that); "
            f"what if: {format_seconds(self.other)} ({self.other / self.same:.2f} x)"
        )


def what_if(run: Run, settings: Mapping[str, Any] | None = None, network: str = "") -> WhatIf:
    """Simulates `run` as it is now and with `settings` (path: value), with sizes only.

    network: a name in `workbench.fabric.networks`, instead of the run's network; `settings` take precedence

    Above 64 ranks, one replica is simulated for all. Each rank is as fast as the slowest is expected to be.

    Raises KnobError if a setting is invalid or cannot be simulated, ValueError if the run has no complete step.
    """
    _require_mapping(settings)
    with doing("what if", 2):
        return RunPredictor(run).what_if(settings or {}, network)


def predict_scaling(run: Run, settings: Mapping[str, Any] | None = None, network: str = "",
            ranks: Sequence[int] = RANK_COUNTS) -> Scaling:  # fmt: skip
    """ranks: numbers of ranks, up to 4,096. Raises KnobError."""
    _require_mapping(settings)
    if not isinstance(ranks, (list, tuple, range)):
        raise KnobError(f"ranks={short(ranks)}: must be a list of numbers of ranks, such as [8, 64, 4096]")
    with doing("scaling"):
        return RunPredictor(run).predict_scaling(settings or {}, network, list(ranks))


def _require_mapping(settings: Any) -> None:
    if not isinstance(settings or {}, Mapping):
        raise KnobError(f"settings={short(settings)}: must be a dict of values by path, such as {{'ranks': 16}}")


class RunPredictor:
    """Measures costs and simulates the run's settings once."""

    def __init__(self, run: Run) -> None:
        self.now = present_experiment(run)
        self._costs = Costs.measured(run)
        self._measured = mean_seconds(run, *_settled_range(run))
        self._quick = QuickSimulator(self.now, self._costs)

    @cached_property
    def _same_seconds(self) -> float:
        return mean_seconds(self._simulate_steps(self.now), UNTYPICAL_STEPS, _count_steps(self.now))

    def what_if(self, settings: Mapping[str, Any], network: str = "") -> WhatIf:
        other = self._apply_settings(settings, network)
        about = list_assumptions(self.now, other, self._costs, network, self._same_seconds / self._measured - 1.0)
        if other.ranks > MAX_UNEVEN_RANKS:
            told = self._quick.predict_step(other)
            return WhatIf(self._measured, self._same_seconds, told.seconds, other, told.run, told.sent, about)
        same, imagined = self._same_seconds, self._simulate_steps(other)
        stop = _count_steps(other)
        return WhatIf(self._measured, same, mean_seconds(imagined, UNTYPICAL_STEPS, stop), other, imagined,
                      mean_sent_bytes(imagined, UNTYPICAL_STEPS, stop), about)  # fmt: skip

    def predict_scaling(self, settings: Mapping[str, Any], network: str, ranks: Sequence[int]) -> Scaling:
        rows = [
            make_scaling_row(self._quick, n, lambda n: self._apply_settings({**settings, "ranks": n}, network))
            for n in ranks
        ]
        most = max((row.experiment for row in rows if row.experiment), key=lambda e: e.ranks, default=self.now)
        return Scaling(
            rows, list_assumptions(self.now, most, self._costs, network, self._same_seconds / self._measured - 1.0)
        )

    def _apply_settings(self, settings: Mapping[str, Any], network: str) -> Experiment:
        named = found(network).settings(int(settings.get("ranks", self.now.ranks))) if network else {}
        return user_input.turned(self.now, {**named, **settings}.items())

    def _simulate_steps(self, e: Experiment) -> Run:
        return simulate(replace(e, steps=_count_steps(e), eval_every=0, policy=ByHand()), costs=self._costs)


def present_experiment(run: Run) -> Experiment:
    """Returns a run's experiment with its changes so far."""
    return fold(run.experiment, run.changes, Experiment.set)[-1][1].checked()


def _count_steps(experiment: Experiment) -> int:
    """Whole rounds of a periodic strategy."""
    every = int(getattr(experiment.strategy, "every", 1))
    rounds = max(MIN_ROUNDS, -(-MIN_STEPS // every))
    return UNTYPICAL_STEPS + rounds * every


def _settled_range(run: Run) -> tuple[int, int]:
    """Returns the range of recent steps under the present settings."""
    first, stop = analysis.last_steps(run.timeline, MIN_STEPS)
    changed = [c.at_step + UNTYPICAL_STEPS for c in run.changes]
    return min(max(first, UNTYPICAL_STEPS if stop > UNTYPICAL_STEPS else 0, *changed), max(stop - 1, 0)), stop
