"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule, backwards, forwards


@dataclass(frozen=True, kw_only=True)
class GPipe(Schedule):
    """All micro-batches forward, then all of them backward.

        stage 0   F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
        stage 1    . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
        stage 2    .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .

    If all p stages take equally long, they are idle for (p-1) / (m+p-1) of the time. Every stage keeps the activations
    of all m micro-batches at once. Here backwards follow the order of the forwards. The paper's figure reverses the
    order. It takes as long.

    When to use it: to see the simplest pipeline. OneFOneB has the same bubble and keeps fewer activations.

    Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019, https://arxiv.org/abs/1811.06965, figure 2
    """

    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        return forwards(*range(micros)) + backwards(*range(micros))
