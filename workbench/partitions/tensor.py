"""Tensor parallelism: ranks hold slices of each layer's matrices and compute together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from workbench.compressors import Compressor, Dense
from workbench.partitions._base import Coding, Partition
from workbench.partitions._checkpoint import CHECKPOINT, CHECKPOINT_EVERY, CHECKPOINTS
from workbench.partitions._codecs import coding, refused
from workbench.rank import Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Tensor(Partition):
    """Each of t ranks has 1/t of a layer's matrices. All compute together, as in Megatron-LM.

        Y_k = gelu(X A_k)               columns of A: k's own features of Y, without communication
        Z   = sum over k of Y_k B_k     rows of B: one all-reduce (g); backward it is one of X's gradient (f)

    Attention is split by heads, an embedding by its vocabulary and the head by its outputs. All ranks gather these
    outputs. A transformer's layer costs two all-reduces of its activations forward and two backward, independent of the
    model's size. So these ranks need the fastest links. Every rank holds and computes all remaining parts: norms, and
    the biases after an all-reduce. One of the t ranks keeps their optimizer state and sends its new values to the other
    ranks before the next forward. So strategies and codecs cannot make these copies diverge.

    With `sequence`, each rank computes norms and dropout between layers for its own positions only. An all-reduce
    becomes a reduce-scatter after one layer and an all-gather before the next, with as many bytes together. A rank
    keeps 1/t of the activations between layers for its backward. There, a layer split by columns gathers its input once
    more. Norms and the biases after a layer split by rows get gradients of these positions only. A small all-reduce
    adds up each gradient.

    A task's plan (`split`) names the layers to split; a transformers model has a plan of its own. In a Sequential they
    are pairs of Linears with only element-wise layers between. Inside a pair each rank draws its own random numbers;
    elsewhere all ranks draw the same. A layer with dropout inside a pair that checkpointing recomputes draws the same
    numbers again.

    `activations` and `gradients` can encode what ranks exchange, without error feedback. Each rank encodes its
    contribution. All ranks gather the payloads, decode them and add them up in rank order. A rank then sends t-1
    payloads in place of an all-reduce. A linear codec (Cast) keeps the all-reduce. With TopK and `mask` a rank's part
    has gradients only for the entries that it sent. This takes no bytes. The outputs of an embedding and of the last
    layer are sent unencoded, and so is everything in an evaluation.

    When to use it: for layers that are too large for one rank to train, between chips that share a fast link. A
    Pipeline needs less bandwidth. Each rank builds the whole model once before it keeps its part.

    Reference: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019, https://arxiv.org/abs/1909.08053. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", MLSys 2023, https://arxiv.org/abs/2205.05198. Bian et al., "Does compressing activations help model
    parallel training?", 2023, https://arxiv.org/abs/2301.02654
    """

    known_as: ClassVar[tuple[str, ...]] = ("TP", "TensorParallel")
    ways: int = knob(2, 2, 64, unit="ranks", doc="t: ranks that compute each layer together")
    sequence: bool = knob(False, doc="split activations between layers by position (sequence parallelism)")

    activations: Compressor = knob(Dense(), doc="compressor of activations inside a forward")
    gradients: Compressor = knob(Dense(), doc="compressor of the activations' gradients inside a backward")
    mask: bool = knob(True, doc="if activations are sparse (TopK), send their gradients at the same elements only")

    checkpoint: str = knob("none", choices=CHECKPOINTS, doc=CHECKPOINT)
    checkpoint_every: int = knob(1, 1, 64, unit="units", doc=CHECKPOINT_EVERY)

    def dims(self) -> tuple[tuple[str, int], ...]:
        return (("tensor", self.ways),)

    @property
    def slices(self) -> int:
        return self.ways

    @property
    def sequences(self) -> bool:
        return self.sequence

    @property
    def recompute(self) -> tuple[str, int]:
        return self.checkpoint, self.checkpoint_every

    def inside(self, memory: Memory) -> Coding:
        return coding(self.activations, self.gradients, self.mask, memory)

    def fewer(self) -> Iterator[Partition]:
        for ways in range(self.ways - 1, 1, -1):
            yield replace(self, ways=ways)

    def refuses(self, batch: int) -> str | None:
        return refused(self.activations, self.gradients, "inside a layer")
