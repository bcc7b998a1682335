"""What the learning rate of a step is, the same on both hosts: the experiment's `lr` times a factor that may rise.

With `lr_scaled` the rate follows the global batch (linear scaling): k times the batch, k times the rate, for k small
steps in about the same direction come to one that is k times as long. That fails in the first steps, when the
gradient still turns quickly, so the factor may get there in `lr_warmup` equal parts.

Reference: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
https://arxiv.org/abs/1706.02677
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment


def factor(e: Experiment) -> float:
    """By how much `lr` is multiplied once warm: the global batch in units of the one that `lr` is meant for.

    The global batch is what all ranks that train read for one update.
    """
    if not e.lr_scaled:
        return 1.0
    batches = e.strategy.batches(e.replicas)
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
