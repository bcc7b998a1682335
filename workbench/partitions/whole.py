"""Every rank holds and computes the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions._base import Partition
from workbench.partitions._checkpoint import CHECKPOINT, CHECKPOINT_EVERY, CHECKPOINTS
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Whole(Partition):
    """Every rank is a replica: it holds the whole model and computes all of it.

    With `checkpoint` = "units" a forward keeps only what goes into each unit of the model, and backward computes the
    unit once more to have the rest: about a third more compute where all are, for the activations of one unit at a
    time. Units are the parts between which the model may be cut into stages: blocks of a transformer, children of a
    Sequential. Gradients are the same to the bit, for units draw the random numbers again that they drew.
    "attention" computes again only what attention makes of queries, keys and values, which costs little: scores for
    each pair of positions. A fused kernel never keeps these, and then almost nothing is saved. A Tensor has the same
    knobs, a Pipeline in `of`. What ranks of a Tensor say to each other inside of a unit they say again.

    When to use it: while the model fits into a rank's memory, or under a strategy that shards it (ZeRO3).

    Reference: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174;
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023,
    https://arxiv.org/abs/2205.05198
    """

    checkpoint: str = knob("none", choices=CHECKPOINTS, doc=CHECKPOINT)
    checkpoint_every: int = knob(1, 1, 64, unit="units", doc=CHECKPOINT_EVERY)

    @property
    def recompute(self) -> tuple[str, int]:
        return self.checkpoint, self.checkpoint_every
