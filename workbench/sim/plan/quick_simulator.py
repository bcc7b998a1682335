"""Predicts steps quickly: with sizes only, and one replica for all if they behave alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from workbench import analysis
from workbench.experiment import Experiment
from workbench.fabric.pace import SHARES
from workbench.policies import ByHand
from workbench.record.run import Run
from workbench.sim.costs.costs import Costs
from workbench.sim.costs.even_ranks import explain_unlike
from workbench.sim.run.simulate import simulate_sizes

UNTYPICAL_STEPS = 2  # first steps
MIN_STEPS = 4  # measured steps, at least; of a periodic strategy 2 rounds
MAX_UNEVEN_RANKS = 64  # up to which each has its own speed


class QuickPrediction(NamedTuple):
    """Mean seconds and sent bytes per step and rank, and the simulated run.

    alike: whether the first replica stands for all
    even:  whether every rank is as fast as the slowest is expected to be
    """

    seconds: float
    sent: float
    run: Run
    alike: bool
    even: bool


class QuickSimulator:
    """Simulates many settings of one task. Computes the sizes of the task's passes once.

    costs: compute times, unless `pace` gives longer times
    """

    def __init__(self, experiment: Experiment, costs: Costs) -> None:
        self.costs = costs
        self._task, self._learner = experiment.task, experiment.task.build()
        self._seen = dict[Any, Any]()

    def predict_step(self, e: Experiment) -> QuickPrediction:
        """Raises KnobError or StrategyError."""
        every = count_round_steps(e)
        looked = max(MIN_STEPS, 2 * every if every > 1 else 0)
        e = replace(e, steps=UNTYPICAL_STEPS + looked, eval_every=0, policy=ByHand()).checked()
        costs = self._pace_costs(e)
        even = e.ranks > MAX_UNEVEN_RANKS or (
            explain_unlike(e, costs) is not None and explain_unlike(e, costs.even(e.ranks)) is None
        )
        e, costs = replace(e, pace=0.0), costs.even(e.ranks) if even else costs
        pure = self._learner.pure and e.task == self._task
        learner, seen = (self._learner, self._seen) if pure else (e.task.build(), None)
        alike = explain_unlike(e, costs) is None
        run = simulate_sizes(e, learner, costs, alike, seen)
        return QuickPrediction(
            mean_seconds(run, UNTYPICAL_STEPS, e.steps),
            mean_sent_bytes(run, UNTYPICAL_STEPS, e.steps),
            run,
            alike,
            even,
        )

    def _pace_costs(self, e: Experiment) -> Costs:
        paced: Mapping[str, float] = {phase: e.pace * 1e-3 * share for phase, share in SHARES.items()}
        return self.costs.at_least(paced)


def count_round_steps(e: Experiment) -> int:
    """Returns a periodic strategy's steps per round, otherwise 1."""
    return int(getattr(e.strategy, "every", 1)) if e.strategy.periodic else 1


def mean_seconds(run: Run, first: int, stop: int) -> float:
    """Returns the mean seconds per step over the steps [first, stop) and the ranks; NaN without steps."""
    found = analysis.break_down(run.timeline, first, stop)
    return float(np.mean(found.seconds)) if found.steps else float("nan")


def mean_sent_bytes(run: Run, first: int, stop: int) -> float:
    """Returns the mean bytes per step and rank over the steps [first, stop)."""
    each = analysis.bytes_per_step(run.timeline, first, stop)
    return float(np.mean(each)) if len(each) else 0.0
