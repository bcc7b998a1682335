"""Interleaved 1F1B: several pieces of the model per stage make the pipeline fill faster."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions.schedules._base import Action, Schedule
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Interleaved(Schedule):
    """1F1B over v pieces of the model per stage: a micro-batch passes all p stages v times.

        stage 0   F0 F1 F0a F1a  F2 B0a  F3 B1a F2a  B0 F3a  B1   . B2a   . B3a  B2  B3
        stage 1    . F0  F1 F0a B0a F1a B1a  F2  B0  F3  B1 F2a B2a F3a B3a  B2  B3   .

    "F0a" is the forward of micro-batch 0 through a stage's second piece. Piece c p + i of the model is on stage i. A
    pass takes 1/v of a stage's time, so filling and draining take 1/v as long. The lost share of the passes' time is
    (p-1) / (v m + p-1). In return, stages send v times as many activations. A stage keeps the activations of at most 2
    (p-1-i) + (v-1) p + 1 pieces. The schedule takes p micro-batches at a time, so m must be a multiple of p.

    When to use it: for few micro-batches over fast links, and a model with at least v p parts.

    Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, https://arxiv.org/abs/2104.04473, section 2.2.2
    """

    chunks: int = knob(2, 2, 16, unit="pieces", doc="v: pieces of the model on each stage")

    @property
    def pieces(self) -> int:
        return self.chunks

    def refuses(self, stages: int, micros: int) -> str | None:
        if micros % stages:
            return (
                f"micros={micros}: Interleaved needs a multiple of the number of stages; take a multiple of "
                f"{stages}, such as micros={-(-micros // stages) * stages}, or schedule=OneFOneB()"
            )
        return None

    def actions(self, stage: int, stages: int, micros: int) -> list[Action]:
        passes, round_ = micros * self.chunks, stages * self.chunks
        ahead = min(passes, 2 * (stages - 1 - stage) + (self.chunks - 1) * stages)

        def forward(k: int) -> Action:
            return Action("F", k // round_ * stages + k % stages, k % round_ // stages)

        def backward(k: int) -> Action:
            return Action("B", k // round_ * stages + k % stages, self.chunks - 1 - k % round_ // stages)

        order = [forward(k) for k in range(ahead)]
        for k in range(passes - ahead):
            order += [forward(ahead + k), backward(k)]
        return order + [backward(k) for k in range(passes - ahead, passes)]
