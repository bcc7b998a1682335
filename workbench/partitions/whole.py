"""Whole: every rank holds and computes the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions._base import Partition
from workbench.partitions._checkpoint import CHECKPOINT, CHECKPOINT_EVERY, CHECKPOINTS
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Whole(Partition):
    """Every rank is a replica: it holds the whole model and computes all of it.

    With `checkpoint` = "units" a forward keeps only the input of each unit of the model. Backward recomputes the unit
    to get its other activations. If all units do this, a step takes about 33 % more compute. Memory holds the
    activations of one unit at a time. Units are the parts between which the model may be cut into stages: blocks of a
    transformer or children of a Sequential. Gradients are bit-identical, because units draw the same random numbers
    again. "attention" recomputes only the core of attention, from queries, keys and values. This costs little and saves
    the scores of each pair of positions. A fused kernel never keeps these scores, so with it "attention" saves almost
    nothing. A Tensor has the same knobs, and a Pipeline has them in `of`. Ranks of a Tensor repeat the communication
    inside a unit.

    When to use it: while the model fits into a rank's memory, or under a strategy that shards it (ZeRO3).

    Reference: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023,
    https://arxiv.org/abs/2205.05198
    """

    checkpoint: str = knob("none", choices=CHECKPOINTS, doc=CHECKPOINT)
    checkpoint_every: int = knob(1, 1, 64, unit="units", doc=CHECKPOINT_EVERY)

    @property
    def recompute(self) -> tuple[str, int]:
        return self.checkpoint, self.checkpoint_every
