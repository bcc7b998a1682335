"""PipeDream-2BW: no flush, and two versions of the weights at any depth."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule, backwards, forwards


@dataclass(frozen=True, kw_only=True)
class PipeDream2BW(Schedule):
    """1F1B without a flush: each batch of m micro-batches updates, and all read the same weights.

        stage 0   F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3
        stage 1    . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5
        stage 2    .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    Micro-batches m to 2m-1 are the next batch's, and so on. While a batch goes backward, the first micro-batches of the
    next batch go forward. On every stage and until its end, that batch reads the newest weights before the present
    batch's update:

        w(k+1) = w(k) - lr * gradient of f at w(k-1),      w(-1) = w(0)

    where f is the loss of batch k. Any optimizer works. So the delay is one step for any p, and each stage keeps two
    versions of its weights ("double-buffered weights"). Stage i keeps the activations of p-i micro-batches. This
    requires m >= p. Once the pipeline is full, equal stages wait only for messages.

    The pipeline drains before any change, and a held-out loss drains nothing. PipeDream explains this, random numbers
    and running statistics. Here a stage is p-1-i micro-batches ahead.

    When to use it: like PipeDream, but for deeper pipelines and larger batches with far less memory.

    Reference: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021,
    https://arxiv.org/abs/2006.09503, section 3.1
    """

    @property
    def delayed(self) -> bool:
        return True

    def refuses(self, stages: int, micros: int) -> str | None:
        if micros < stages:
            return (
                f"micros={micros}: PipeDream2BW keeps two versions of the weights, so a batch needs at least as many "
                f"micro-batches as stages; take micros={stages} or more, or schedule=OneFOneB()"
            )
        return None

    def ahead(self, stage: int, stages: int) -> int:
        return stages - 1 - stage

    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        ahead, order = self.ahead(stage, stages), list[Action]()
        for micro in range(micros):
            order += forwards(ahead + micro) + backwards(micro)
        return order
