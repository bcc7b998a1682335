"""One rank's learning rate."""

from __future__ import annotations

from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.experiment.rate_factor import compute_rate_factor
from workbench.host.core.rank_view import RankView
from workbench.tasks import at_rate, rate

FIXED_POINT = 2**40  # stands for a factor of 1


class Rate:
    """Raises the learning rate's factor linearly at a start or a change.

    own:   the optimizer's rate, if the experiment sets none
    begun: the step from which the factor rises
    first: the factor at that step
    """

    def __init__(self, e: Experiment, optimizer: Optimizer) -> None:
        self.own = rate(optimizer)
        self.begun = 0
        self.first = 1.0 if e.lr_scaled else 1.0 / max(1, e.lr_warmup)
        self._said: float | None = None

    def compute_factor(self, e: Experiment, step: int) -> float:
        if not e.lr_warmup:
            return compute_rate_factor(e)
        risen = min(1.0, (step - self.begun) / e.lr_warmup)
        return self.first + (compute_rate_factor(e) - self.first) * risen

    def change_factor(self, was: Experiment, wanted: Experiment, step: int) -> None:
        """Starts a different factor or warmup at the current factor, before `step`."""
        if (compute_rate_factor(was), was.lr_warmup) != (compute_rate_factor(wanted), wanted.lr_warmup):
            self.first, self.begun = self.compute_factor(was, step), step

    def go_back(self, step: int) -> None:
        """Lets the factor rise from `step` if it began later, which is undone."""
        self.begun = min(self.begun, step)

    def compute_rate(self, run: RankView, step: int | None = None) -> float:
        """Returns the learning rate of `step`; by default the present one."""
        e, step = run.experiment, run.rank.step if step is None else step
        scheduled = run.learner.schedule(step) if run.learner.schedule else 1.0
        return (e.lr or self.own) * self.compute_factor(e, step) * scheduled

    def set_rate(self, run: RankView, due: float | None = None) -> None:
        rank, due = run.rank, self.compute_rate(run) if due is None else due
        if due != rank.lr:
            at_rate(run.optimizer, due)
            rank.lr = due
        rank.rated = lambda step: self.set_rate(run, self.compute_rate(run, step))
        if due != self._said:
            self._said = due
            run.sample("lr", due)

    async def agree_on_factor(self, run: RankView) -> None:
        """Makes factors rise like rank 0's."""
        step, e = run.rank.step, run.experiment
        present = round(self.compute_factor(e, step) * FIXED_POINT)
        self.first, self.begun = (await run.gather(present))[0] / FIXED_POINT, step
