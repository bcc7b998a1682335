"""Pipeline parallelism: stages hold consecutive layers, and micro-batches pass through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from workbench.compressors import Compressor, Dense
from workbench.partitions._base import Coding, Partition
from workbench.partitions._codecs import coding, refused
from workbench.partitions.schedules import Action, OneFOneB, Schedule
from workbench.partitions.whole import Whole
from workbench.rank import Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Pipeline(Partition):
    """Consecutive layers on consecutive ranks: p stages make a replica, m micro-batches pass.

        x of micro-batch i:       0 -> 1 -> ... -> p-1            activations, from stage to stage
        its gradient:             0 <- 1 <- ... <- p-1
        after all m backwards:    the strategy's exchange between the ranks with the same stage

    Each rank holds parameters, gradients and optimizer state of its own stage, about 1/p of the model's. It cuts
    its batch into m equal parts. Their gradients add up to the gradients of the batch. Stages wait for each other while
    the pipeline fills and drains. Under GPipe and 1F1B, stages of equal speed wait for a share (p-1) / (m+p-1) of the
    passes' time. PipeDream and PipeDream2BW never drain it and update with stale gradients. Between two stages, ranks
    send the activation of each micro-batch and its gradient. Their bytes do not depend on the model's size. With
    `micros` = 1 it is naive layer parallelism: one stage computes at a time.

    `activations` and `gradients` can encode what stages send. There is no error feedback, because the next activation
    does not need the unsent part of this one. With TopK and `mask` only the entries that were sent have gradients.
    Ranks send these for the same entries. Frozen parameters and buffers stay on every rank. A loss must be a mean over
    examples. It must draw no random numbers outside the model, because each stage draws its own.

    With `of` = Tensor() each stage is t ranks that compute its layers together. This suits fast links inside a stage
    and slow links between stages.

    A Sequential is cut between its children, a transformers decoder between its layers. Another model is cut between
    the parts that its task names. `cuts` holds the numbers of the parts at which stages 1 to p-1 begin. Without `cuts`
    the largest stage gets as few parameters as possible, embeddings not counted. If the time of layers does not follow
    their parameters, `balance(experiment)` measures it and returns the cuts that make the slowest stage fastest. With
    several pieces per stage there are p v - 1 cuts, one for each piece of the model after the first.

    When to use it: for a model that one rank cannot hold or compute. Links may be too slow to exchange all its
    gradients or parameters in each step.

    Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019, https://arxiv.org/abs/1811.06965
    """

    known_as: ClassVar[tuple[str, ...]] = ("PP", "PipelineParallel")
    stages: int = knob(2, 2, 64, unit="stages", doc="p: stages of one replica")
    micros: int = knob(4, 1, 1024, unit="micro-batches", doc="m: equal parts that a replica's batch is cut into")
    schedule: Schedule = knob(OneFOneB(), doc="the order of a stage's forwards and backwards")
    cuts: tuple[int, ...] = knob((), doc="first part of each piece after the first; empty: cut evenly")
    of: Partition = knob(
        Whole(), doc="Whole: each stage is on one rank; Tensor: several ranks split each layer of a stage"
    )

    activations: Compressor = knob(Dense(), doc="compressor of activations between stages")
    gradients: Compressor = knob(Dense(), doc="compressor of the activations' gradients between stages")
    mask: bool = knob(True, doc="if activations are sparse (TopK), send their gradients at the same elements only")

    def dims(self) -> tuple[tuple[str, int], ...]:
        return (("stage", self.stages), *self.of.dims())

    @property
    def slices(self) -> int:
        return self.of.slices

    @property
    def sequences(self) -> bool:
        return self.of.sequences

    @property
    def pieces(self) -> int:
        return self.schedule.pieces

    @property
    def micro_batches(self) -> int:
        return self.micros

    def actions(self, stage: int) -> list[Action]:
        return self.schedule.actions(stage, self.stages, self.micros)

    def ahead(self, stage: int) -> int:
        return self.schedule.ahead(stage, self.stages)

    @property
    def delayed(self) -> bool:
        return self.schedule.delayed

    @property
    def layers(self) -> Partition:
        return self.of

    @property
    def recompute(self) -> tuple[str, int]:
        return self.of.recompute

    def between(self, memory: Memory) -> Coding:
        return coding(self.activations, self.gradients, self.mask, memory)

    def inside(self, memory: Memory) -> Coding:
        return self.of.inside(memory)

    def fewer(self) -> Iterator[Partition]:
        for stages in range(self.stages - 1, 1, -1):
            yield replace(self, stages=stages, cuts=())
        if self.of.size > 1:
            yield self.of
            yield from self.of.fewer()

    def refuses(self, batch: int) -> str | None:
        if self.of.depth > 1:
            kind = type(self.of).__name__
            return f"of={kind}: a stage cannot contain stages; take of=Tensor() or of=Whole(), and more stages"
        if reason := refused(self.activations, self.gradients, "between two stages") or self.of.refuses(0):
            return reason
        if reason := self.schedule.refuses(self.stages, self.micros):
            return reason
        if reason := self._refuses_cuts():
            return reason
        if self.schedule.halves and self.recompute[0] != "none":
            return (
                f"schedule={type(self.schedule).__name__}: each half of a backward would recompute the checkpointed "
                f"units; take schedule=OneFOneB(), or checkpoint=none"
            )
        if self.schedule.halves and self.slices > 1:
            return (
                f"schedule={type(self.schedule).__name__}: ranks that share a stage cannot split a backward into "
                f"halves; take schedule=OneFOneB(), or of=Whole()"
            )
        if self.ahead(0) and self.slices > 1:
            return (
                f"schedule={type(self.schedule).__name__}: it keeps older weights only if each stage is on one rank; "
                f"take of=Whole(), or schedule=OneFOneB()"
            )
        if batch and batch % self.micros:
            fits = [m for m in range(1, batch + 1) if batch % m == 0]
            return (
                f"micros={self.micros}: a replica's batch of {batch} examples cannot be cut into {self.micros} equal "
                f"micro-batches; take micros={_listed(fits)}, or another batch"
            )
        return None

    def _refuses_cuts(self) -> str | None:
        said, pieces = f"cuts={list(self.cuts)}", self.stages * self.pieces
        if self.cuts and len(self.cuts) != pieces - 1:
            each = f" of {self.pieces} pieces each" if self.pieces > 1 else ""
            return (
                f"{said}: {self.stages} stages{each} need {pieces - 1} cuts, and there are {len(self.cuts)}; give "
                f"the first part of each piece after the first, or take cuts=[]"
            )
        if any(b <= a for a, b in pairwise((0, *self.cuts))):
            return (
                f"{said}: cuts must increase and begin at 1 or more, or a piece would be empty; give the first part "
                f"of each piece after the first, in order"
            )
        return None


def _listed(numbers: list[Any], most: int = 6) -> str:
    shown = [str(n) for n in numbers[:most]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
