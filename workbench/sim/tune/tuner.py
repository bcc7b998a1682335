"""`tune`: a search for fast settings on the simulator or on training ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.experiment import Experiment
from workbench.record.store import RunError
from workbench.settings import KnobError
from workbench.sim.costs.costs import Costs
from workbench.sim.plan.quick_simulator import count_round_steps
from workbench.sim.plan.search_space import Trying, apply_settings, current_settings, space_of
from workbench.sim.plan.trials import Settings, Trial, Tuned
from workbench.sim.run.simulate import simulate
from workbench.sim.tune.live_search import Tuning, count_trials, require_arguments
from workbench.sim.tune.proposer import Proposer
from workbench.sim.tune.trial_runner import TrainingRanks, step_seconds


def tune(
    on: Experiment | TrainingRanks,
    paths: Trying = None,
    *,
    within: Mapping[str, tuple[float, float]] | None = None,
    trials: int | None = None,
    steps: int = 8,
    settle: int = 3,
    seed: int = 0,
    costs: Costs | None = None,
    **live: Any,
) -> Tuned:
    """Searches for the settings with the shortest step, by Optuna's Gaussian process.

    on:     an Experiment to simulate, which stays unchanged. Or a Lab with training ranks (`lab.tune(...)`); the call
            then waits for the end of the search
    paths:  live knobs to tune: by knob a list of values (numbers, or members such as `LocalSGD(every=16)`) or a range
            `(low, high)`; or a list of knobs, each in its own range. None: under ByteScheduler its partition and
            credit; otherwise bucket, compressor, strategy and period, and a pipeline's micro-batches
    within: by path, a narrower range (low, high) for a list of knobs
    trials: number of settings to try, with the present one first. None: the smaller of 20 and 22 % of all settings
    steps:  steps of a trial that count, after `settle` steps that do not. On training ranks: steps at the first look
    costs:  for the simulator, as in `simulate`. By default for a lab: measured from its run
    live:   see `Tuning`

    On the simulator only time counts. A refused trial has no time.

    Raises KnobError if a knob cannot be searched, a range is invalid, the lab has no live run or Optuna is missing.
    Raises RunError if the run ends before the trials do.

    Reference: Peng et al., SOSP 2019, https://doi.org/10.1145/3341301.3359642 (ByteScheduler's two knobs, and their
    gain); Akiba et al., "Optuna", KDD 2019, https://arxiv.org/abs/1907.10902
    """
    if not isinstance(on, Experiment):
        return Tuning(on, paths, within=within, trials=trials, steps=steps, settle=settle, seed=seed, costs=costs,
                      **live).start().wait()  # fmt: skip
    if live:
        raise KnobError(f"{', '.join(live)}: these arguments are for ranks that train; give a Lab")
    require_arguments((("steps", steps, 1), ("settle", settle, 0)), trials, seed, within)
    dims = space_of(on, paths, within or {})
    number = count_trials(trials, dims)
    proposer, tried = Proposer(dims, number, seed), list[Trial]()
    settings = current_settings(on, dims)
    asked = proposer.propose_first(settings)
    while True:
        tried.append(_simulate_trial(on, settings, steps, settle, costs))
        proposer.report_trial(asked, tried[-1].seconds, -1.0)
        if len(tried) == number or (found := proposer.propose_next()) is None:
            break
        asked, settings = found
    timed = [trial for trial in tried if trial.seconds is not None]
    if not timed:
        raise KnobError(f"tune: all {len(tried)} trials were refused, the last {tried[-1].settings}: "
                        f"{tried[-1].verdict.removeprefix('refused: ')}")  # fmt: skip
    return Tuned(min(timed, key=lambda trial: trial.seconds or 0.0), tuple(tried))


def _simulate_trial(e: Experiment, settings: Settings, steps: int, settle: int, costs: Costs | None) -> Trial:
    try:
        told = apply_settings(e, settings)
        each = count_round_steps(told)
        count = -(-steps // each) * each  # whole rounds
        times = step_seconds(simulate(replace(told, steps=settle + count), costs=costs), settle)
    except KnobError as error:
        return Trial(settings=settings, verdict=f"refused: {error}")
    if not times:
        raise RunError(f"tune: rank 0 made no step of its own from step {settle} on; take more than steps={steps}")
    mean = statistics.fmean(times) / told.strategy.batches(1)
    return Trial(settings=settings, seconds=mean, low=mean, high=mean, ranks=told.ranks, steps=settle + count, fit=True)
