"""ZB-H1: backward in two halves, of which the second waits until there is nothing better to do."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule, forwards


@dataclass(frozen=True, kw_only=True)
class ZeroBubble(Schedule):
    """1F1B with each backward in two halves, of which only the first is waited for (ZB-H1).

        stage 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    "I0" is the gradient of what went into the stage with micro-batch 0, which the stage before waits for, "W0" that of
    the stage's parameters, for which nobody waits: stage i does it i micro-batches later and fills with it what would
    be waiting. Where a forward and both halves take equally long, (p-1) / (3m+p-1) of the time is lost, a third of
    1F1B's; a backward in halves costs a little more than one in full, and a stage keeps the activations of
    min(m, p) micro-batches, as the first one does under 1F1B. Layers that are checkpointed are computed again for each
    half.

    ZB-H2, which keeps twice as much and loses nothing, and an optimizer that steps before all stages know the
    gradient's norm are not here: the step ends for all stages together.

    When to use it: where 1F1B's bubble hurts and more micro-batches cannot be had.

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
