"""PipeDream: no flush, and each minibatch in flight keeps the weights that it began with."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule, backwards, forwards


@dataclass(frozen=True, kw_only=True)
class PipeDream(Schedule):
    """1F1B without a flush: each minibatch updates, and its backward uses its forward's weights.

        stage 0   F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3
        stage 1    . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5
        stage 2    .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    A step is a minibatch. Stage i makes the forward of the minibatch p-1-i steps ahead, then the backward of its own
    minibatch, then the strategy's part. Once the pipeline is full, equal stages wait only for messages. But gradients
    are stale. With stashing, step k is

        w(k+1) = w(k) - lr * gradient of f at (w_0(k-p+1), w_1(k-p+2), ..., w_{p-1}(k)),      w(k) = w(0) for k < 0

    where w_i is stage i's part, and f the loss of minibatch k. Any optimizer works. Stage i keeps activations of p-i
    minibatches and p-i versions of its weights, including the newest. Before an update it copies a version that a later
    backward still reads, so the last stage copies nothing. Vertical sync is not implemented.

    The pipeline drains before any change. Each stage has then made the same updates. It keeps its newest weights and
    drops the forwards that it was ahead. Their minibatches go forward again, so they are not lost. A held-out loss uses
    the newest weights and drains nothing. If gradients are clipped, all stages wait for each other in each step.

    Two things differ from a schedule with a flush. Random numbers of dropped forwards (dropout) are used up, so their
    minibatches draw new numbers. In an evaluation, a stage's running statistics (BatchNorm) include the p-1-i
    minibatches that it is ahead. Its weights do not.

    When to use it: if 1F1B's bubble hurts and stale gradients do not. Slow links, many steps and a rate that warms up
    suit it.

    Reference: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    https://doi.org/10.1145/3341301.3359646, sections 3.2 and 3.3, figure 4
    """

    def refuses(self, stages: int, micros: int) -> str | None:
        if micros > 1:
            return (
                f"micros={micros}: PipeDream updates after every batch and does not cut it; take micros=1, or "
                f"schedule=PipeDream2BW(), which sums micro-batches"
            )
        return None

    def ahead(self, stage: int, stages: int) -> int:
        return stages - 1 - stage

    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        return forwards(self.ahead(stage, stages)) + backwards(0)
