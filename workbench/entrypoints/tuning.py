"""`workbench tune`: trains a run, tries settings on it and prints each trial."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from workbench.analysis import last_steps
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.sim.plan.search_space import space_of

SETTLE_STEPS = 20  # steps before the first trial, for full speed and a trend of the loss
POLL_INTERVAL = 0.2  # seconds between checks of the trials


def tune_run(e: Experiment, space: dict[str, Any] | None, trials: int | None, worse: float, out: Path | None) -> Any:
    """Returns the result of the search. Raises the errors of `lab.tune`; always closes the lab."""
    space_of(e.checked(), space, {})  # refuses an invalid space first
    with Lab(ranks=e.ranks, name="tune") as lab:
        run = lab.run(e, out=out)
        while run.live and last_steps(run.timeline)[1] < SETTLE_STEPS:
            time.sleep(POLL_INTERVAL)
        tuning = lab.tune(space, trials=trials, worse=worse)
        said = 0
        while tuning.live:
            said = _print_trials(tuning.trials[:-1], said)  # the last trial is under way
            time.sleep(POLL_INTERVAL)
        _print_trials(tuning.trials, said)
        found = tuning.wait()
        typer.echo(f"best: {found.best.cells[0]}, {found.best.cells[1]} per step; {found.steps} steps in all")
        if found.left_out:
            typer.echo(f"not tried: {len(found.left_out)} more, which are refused or far slower in the simulator")
        lab.stop()
        run.wait()
        return found


def _print_trials(trials: list[Any], said: int) -> int:
    for number, trial in enumerate(trials[said:], start=said + 1):
        typer.echo(f"{number}. " + "; ".join(filter(None, trial.cells)))
    return max(said, len(trials))
