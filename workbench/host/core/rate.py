"""One rank's learning rate while it trains: how it gets from one factor to the next, and how ranks agree on it."""

from __future__ import annotations

from typing import Any

from workbench.experiment import Experiment
from workbench.experiment.rates import factor
from workbench.tasks import at_rate, rate

ONE = 2**40  # a factor of 1 as a whole number, for ranks to agree on


class Rate:
    """One rank's learning rate. Its factor begins, at a start or a change, where it was and rises in equal parts."""

    def __init__(self, e: Experiment, optimizer: Any) -> None:
        self.own = rate(optimizer)  # where the experiment gives none
        self.begun = 0  # the step from which the factor rises
        self.first = 1.0 if e.lr_scaled else 1.0 / max(1, e.lr_warmup)
        self._said: float | None = None

    def factor(self, e: Experiment, step: int) -> float:
        """The factor of `step`: from `first` to the full one over `lr_warmup` steps."""
        if not e.lr_warmup:
            return factor(e)
        risen = min(1.0, (step - self.begun) / e.lr_warmup)
        return self.first + (factor(e) - self.first) * risen

    def change(self, was: Experiment, wanted: Experiment, step: int) -> None:
        """A change acts before `step`: if it means another factor, that is risen to from the present one."""
        if (factor(was), was.lr_warmup) != (factor(wanted), wanted.lr_warmup):
            self.first, self.begun = self.factor(was, step), step

    def due(self, run: Any, step: int | None = None) -> float:
        """The rate of `step`, or of the present one."""
        e, step = run.experiment, run.rank.step if step is None else step
        scheduled = run.learner.schedule(step) if run.learner.schedule else 1.0
        return (e.lr or self.own) * self.factor(e, step) * scheduled

    def follow(self, run: Any, due: float | None = None) -> None:
        """Before a step and after a change: sets what is due, and writes it down if it is new."""
        rank, due = run.rank, self.due(run) if due is None else due
        if due != rank.lr:
            at_rate(run.optimizer, due)
            rank.lr = due
        rank.rated = lambda step: self.follow(run, self.due(run, step))
        if due != self._said:
            self._said = due
            run.sample("lr", due)

    async def agree(self, run: Any) -> None:
        """Ranks that each counted steps of their own rise together from now on, as rank 0 does."""
        step, e = run.rank.step, run.experiment
        present = round(self.factor(e, step) * ONE)
        self.first, self.begun = (await run.gather(present))[0] / ONE, step
