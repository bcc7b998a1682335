"""ZB-H1: backward in two halves; the second waits until the stage would be idle."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule, forwards


@dataclass(frozen=True, kw_only=True)
class ZeroBubble(Schedule):
    """1F1B with each backward in two halves; other stages wait only for the first (ZB-H1).

        stage 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    "I0" is the gradient of the stage's input for micro-batch 0. The previous stage waits for it. "W0" is the gradient
    of the stage's parameters, and no stage waits for it. Stage i computes it i micro-batches later in time that would
    be idle. If a forward and both halves take equally long, the lost share of the time is (p-1) / (3m+p-1). This is
    about 33 % of 1F1B's share. Two halves cost a little more than a whole backward. A stage keeps the activations of
    `min(m, p)` micro-batches, as the first stage does under 1F1B. Each half recomputes checkpointed layers.

    ZB-H2 keeps twice as many activations and loses no time. It is not implemented. Neither is an optimizer that steps
    before all stages know the gradient's norm. The step ends for all stages together.

    When to use it: if 1F1B's bubble hurts and more micro-batches are not possible.

    Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, section 2.3
    """

    @property
    def halves(self) -> bool:
        return True

    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        ahead = min(stages - 1 - stage, micros)
        order = forwards(*range(ahead))
        for micro in range(micros):
            order += forwards(ahead + micro) if ahead + micro < micros else []
            order.append(Action("I", micro))
            if micro >= stage:
                order.append(Action("W", micro - stage))
        return order + [Action("W", micro) for micro in range(max(0, micros - stage), micros)]
