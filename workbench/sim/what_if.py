"""What if: a run's present settings, and others, on the simulator that was calibrated from the run itself.

run.what_if({"ranks": 16, "link.bandwidth": 100})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench import analysis
from workbench.analysis.words import duration
from workbench.experiment import Experiment, given
from workbench.policies import ByHand
from workbench.settings import KnobError, fold, short
from workbench.sim import Costs, simulate

if TYPE_CHECKING:
    from workbench.analysis.words import duration
from workbench.record.run import Run

LOOKED = 40  # steps that are looked at and simulated, at least
ROUNDS = 4  # rounds of a periodic strategy that are simulated, at least
SETTLE = 2  # steps after a change, or at a simulation's beginning, that are not like the others


class WhatIf(NamedTuple):
    """Mean seconds per step: as measured, the simulator's for the same settings, and its own for the others."""

    measured: float
    same: float
    other: float
    experiment: Experiment  # the others
    run: Run  # simulated under them
    sent: float  # bytes per step and rank under them

    @property
    def error(self) -> float:
        """By how much the simulator is off where it can be checked, as a share of what was measured."""
        return self.same / self.measured - 1.0

    def __repr__(self) -> str:
        return (
            f"measured {duration(self.measured)} per step; simulated {duration(self.same)} ({self.error:+.0%} "
            f"of that); "
            f"what if: {duration(self.other)} ({self.other / self.same:.2f} x)"
        )


def what_if(run: Run, settings: Mapping[str, Any] | None = None) -> WhatIf:
    """Simulates `run` as it is now and with `settings` (path: value), sizes only; costs are measured from the run.

    Raises KnobError for a setting that cannot be or cannot be simulated, ValueError where the run has no whole step.
    """
    now = present(run)
    if not isinstance(settings or {}, Mapping):
        raise KnobError(f"settings={short(settings)}: must be a dict of values by path, such as {{'ranks': 16}}")
    other = given.turned(now, (settings or {}).items())
    costs = Costs.measured(run)
    same, imagined = (simulate(replace(e, steps=_steps(e), eval_every=0, policy=ByHand()), costs=costs)
                      for e in (now, other))  # fmt: skip
    first, stop = _settled(run)
    sent = analysis.bytes_per_step(imagined.timeline, SETTLE, _steps(other))
    return WhatIf(
        _mean(run, first, stop), _mean(same, SETTLE, _steps(now)), _mean(imagined, SETTLE, _steps(other)),
        other, imagined, float(np.mean(sent)) if len(sent) else 0.0,
    )  # fmt: skip


def present(run: Run) -> Experiment:
    """The experiment of a run with every change that was applied so far."""
    return fold(run.experiment, run.changes, Experiment.set)[-1][1].checked()


def _steps(experiment: Experiment) -> int:
    """How many steps show what a step costs on average: whole rounds of a strategy that has any."""
    every = int(getattr(experiment.strategy, "every", 1))
    rounds = max(ROUNDS, -(-LOOKED // every))
    return SETTLE + rounds * every


def _settled(run: Run) -> tuple[int, int]:
    """The newest steps that were all made under the present settings."""
    first, stop = analysis.last_steps(run.timeline, LOOKED)
    changed = [c.at_step + SETTLE for c in run.changes]
    return min(max(first, SETTLE if stop > SETTLE else 0, *changed), max(stop - 1, 0)), stop


def _mean(run: Run, first: int, stop: int) -> float:
    found = analysis.breakdown(run.timeline, first, stop)
    return float(np.mean(found.seconds)) if found.steps else float("nan")
