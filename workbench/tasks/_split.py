"""Plans of tensor parallelism, with torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Colwise:
    """Each rank has some of a Linear's outputs: columns of A in Y = X A, which torch keeps as rows of `weight`.

    packed:   number of matrices in the weight, such as 3 for a fused qkv; each is split
    together: number of outputs that stay on one rank, such as an attention head's
    gather:   whether every rank gets all outputs

    Reference: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019, https://arxiv.org/abs/1909.08053
    """

    packed: int = 1
    together: int = 1
    gather: bool = False


@dataclass(frozen=True, kw_only=True)
class Rowwise:
    """Each rank has some of a Linear's inputs, from a Colwise before. The ranks add up their outputs.

    In an Embedding each rank has some rows of the vocabulary. Reference: as `Colwise`.
    """


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Every rank applies the whole module to its own heads or features, as a norm of each head's queries.

    The gradients of its parameters are partial sums (DTensor's "partial"), which the ranks add up.
    """


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Under sequence parallelism the module computes each rank's own positions: a norm or dropout between layers.

    Else the module stays whole. Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", MLSys 2023, https://arxiv.org/abs/2205.05198
    """


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Under sequence parallelism each rank takes its own positions of the module's input: the first block.

    Modules from here to a gathering Colwise receive only this rank's positions. So a model must take sizes from a
    layer's output. The module's first argument is `(batch, positions, features)`. Reference: as `Sequence`.
    """


Way = Colwise | Rowwise | Partial | Sequence | Scatter
Plan = Mapping[str, "Way | str"]  # by module name; `*` stands for one part of a name: "blocks.*.up"

# the names in the `_tp_plan` of a transformers model
_SAID: dict[str, Way] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "colwise_rep": Colwise(gather=True),
    "colwise_gather_output": Colwise(gather=True),
    "embedding_rowwise": Rowwise(),
    "vocab_parallel_rowwise": Rowwise(),
    "replicated_with_grad_allreduce": Partial(),
    "sequence_parallel": Sequence(),
}


def way_of(said: object) -> Way | None:
    """Returns a plan's entry for a module as a Way, or None."""
    if isinstance(said, Way):
        return said
    return _SAID.get(said) if isinstance(said, str) else None
