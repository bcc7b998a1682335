"""What the learning rate of a step is, the same on both hosts: the experiment's `lr` times a factor that may rise.

With `lr_scaled` the rate follows the global batch (linear scaling): k times the batch, k times the rate, for k small
steps in about the same direction come to one that is k times as long. That fails in the first steps, when the
gradient still turns quickly, so the factor may get there in `lr_warmup` equal parts.

Reference: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
https://arxiv.org/abs/1706.02677
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.tasks import at_rate, rate

if TYPE_CHECKING:
    from workbench.experiment import Experiment

ONE = 2**40  # a factor of 1 as a whole number, for ranks to agree on


def factor(e: Experiment) -> float:
    """By how much `lr` is multiplied once warm: the global batch in units of the one that `lr` is meant for.

    The global batch is what all ranks that train read for one update.
    """
    if not e.lr_scaled:
        return 1.0
    batches = e.strategy.batches(e.ranks)
    return batches * e.batch / (e.lr_base or e.task.batch) if e.batch else float(batches)


def refused(e: Experiment) -> str | None:
    """Why the rate cannot follow the batch, in a sentence that says what would do; or None."""
    if not e.lr_scaled:
        return None
    if e.lr_base and not e.batch:
        return f"lr_base={e.lr_base}: this task makes its own batches; give `batch`, or lr_base=0 for one rank's batch"
    if e.batch and not (e.lr_base or e.task.batch):
        return "lr_scaled=True: this task does not say which batch its rate is meant for; give lr_base"
    return None


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

    def turn(self, was: Experiment, wanted: Experiment, step: int) -> None:
        """A change acts before `step`: if it means another factor, that is risen to from the present one."""
        if (factor(was), was.lr_warmup) != (factor(wanted), wanted.lr_warmup):
            self.first, self.begun = self.factor(was, step), step

    def follow(self, run: Any) -> None:
        """Before a step and after a change: sets what is due, and writes it down if it is new."""
        e, rank = run.experiment, run.rank
        due = (e.lr or self.own) * self.factor(e, rank.step)
        if due != rank.lr:
            at_rate(run.optimizer, due)
            rank.lr = due
        if due != self._said:
            self._said = due
            run.sample("lr", due)

    async def agree(self, run: Any) -> None:
        """Ranks that each counted steps of their own rise together from now on, as rank 0 does."""
        step, e = run.rank.step, run.experiment
        present = round(self.factor(e, step) * ONE)
        self.first, self.begun = (await run.gather(present))[0] / ONE, step
