"""1F1B: after a warm-up each stage alternates between one forward and one backward."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule, backwards, forwards


@dataclass(frozen=True, kw_only=True)
class OneFOneB(Schedule):
    """1F1B: after warm-up forwards, a stage alternates backward and forward (PipeDream-Flush).

        stage 0   F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1    . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2    .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

    Stage i is p-1-i forwards ahead of the last stage. It loses the same (p-1) / (m+p-1) of the time as GPipe. But stage
    i keeps the activations of at most min(m, p-i) micro-batches instead of m. So m can be large and the bubble small.

    When to use it: in place of GPipe.

    Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, https://arxiv.org/abs/2104.04473, section 2.2.1. The order is that of Narayanan et al., "PipeDream:
    Generalized Pipeline Parallelism for DNN Training", SOSP 2019, https://doi.org/10.1145/3341301.3359646
    """

    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        ahead = min(stages - 1 - stage, micros)
        order = forwards(*range(ahead))
        for micro in range(micros - ahead):
            order += forwards(ahead + micro) + backwards(micro)
        return order + backwards(*range(micros - ahead, micros))
