"""Tensor parallelism: the matrices of each layer dealt out over ranks, which compute every layer together."""

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
    """Each of t ranks has 1/t of a layer's matrices, and all t compute each example together, as Megatron-LM does.

        Y_k = gelu(X A_k)               columns of A: k's own features of Y, with nothing to say to others
        Z   = sum over k of Y_k B_k     rows of B: one all-reduce (g); backward it is one of X's gradient (f)

    Attention is dealt out by heads, an embedding by its vocabulary, the head by its outputs, which all gather. A
    transformer's layer costs two all-reduces of its activations forward and two backward, whatever the model's size, so
    ranks that do it want the fastest links there are. What is not dealt out (norms, the biases behind an all-reduce)
    every rank has and computes alike. One rank of the t keeps its optimizer state and gives the others its new values
    before the next forward, so that strategies and codecs, which know nothing of it, cannot drive it apart.

    With `sequence` norms and dropout between layers compute each rank's own positions: an all-reduce becomes a
    reduce-scatter after one layer and an all-gather before the next, of as many bytes together. A rank keeps 1/t of
    what lies between for its backward, where a layer by columns gathers its input once more. Norms and the biases
    behind a layer by rows have the gradient of these positions only, which is added up over the ranks, each in a small
    all-reduce.

    Which layers are dealt out a task says in its plan (`split`), a transformers model in its own; in a Sequential they
    are pairs of Linears with nothing between but what works element by element. Inside a pair each rank draws random
    numbers of its own, elsewhere all draw the same. A layer that drops out inside a pair and is computed again by
    checkpointing draws the same numbers again.

    `activations` and `gradients` may cross in a codec's payload, without error feedback: each rank encodes what it
    brings, all gather the payloads, decode them and add up in rank order; (t-1) payloads sent per rank in place of an
    all-reduce, which a linear codec (Cast) keeps. With TopK and `mask` a rank's part has the gradient of the entries
    that it sent, which takes no bytes. What an embedding has found and what the last layer answers cross as they are,
    and so does all while the model is evaluated.

    When to use it: for layers that are too large for one rank to train, between chips that share a fast link; a
    Pipeline asks less of it. Each rank makes the whole model once, before it keeps its part.

    Reference: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019, https://arxiv.org/abs/1909.08053; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", MLSys 2023, https://arxiv.org/abs/2205.05198; Bian et al., "Does compressing activations help model
    parallel training?", 2023, https://arxiv.org/abs/2301.02654
    """

    known_as: ClassVar[tuple[str, ...]] = ("TP", "TensorParallel")
    ways: int = knob(2, 2, 64, unit="ranks", doc="t: ranks that compute each layer together")
    sequence: bool = knob(False, doc="between layers each rank has its own positions only (sequence parallelism)")

    activations: Compressor = knob(Dense(), doc="what crosses inside of a forward in place of each activation")
    gradients: Compressor = knob(Dense(), doc="what crosses inside of a backward in place of an activation's gradient")
    mask: bool = knob(True, doc="of an activation of which a part was chosen (TopK) only that has a gradient")

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
        return refused(self.activations, self.gradients, "inside of a layer")
