"""The learning rate of a step: the experiment's `lr` times a factor.

`lr_scaled` makes the rate follow the global batch (linear scaling): k small steps in about the same direction add up to
one step k times as long. In the first steps the gradient turns quickly and this fails. So the factor may rise in
`lr_warmup` equal parts.

Reference: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
https://arxiv.org/abs/1706.02677
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView


def compute_rate_factor(e: ExperimentView) -> float:
    """Returns the factor on `lr` after warm-up: the global batch over the batch that `lr` is for.

    The global batch is what all training ranks read for one update.
    """
    if not e.lr_scaled:
        return 1.0
    batches = e.strategy.batches(e.replicas)
    return batches * e.batch / (e.lr_base or e.task.batch) if e.batch else float(batches)


def explain_refusal(e: ExperimentView) -> str | None:
    """Returns why the rate cannot follow the batch, with a remedy; or None."""
    if not e.lr_scaled:
        return None
    if e.lr_base and not e.batch:
        return f"lr_base={e.lr_base}: this task makes its own batches; set `batch`, or lr_base=0 for one rank's batch"
    if e.batch and not (e.lr_base or e.task.batch):
        return "lr_scaled=True: this task does not declare the batch that its rate is meant for; set lr_base"
    return None
