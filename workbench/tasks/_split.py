"""How a task's layers may be dealt out over the ranks of a tensor-parallel group, in the words that torch uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Colwise:
    """Each rank has some of a Linear's outputs: columns of A in Y = X A, which torch keeps as rows of `weight`.

    packed:   so many matrices lie one after the other in the weight, as q, k and v do in a fused one; each is dealt out
    together: outputs that stay on one rank, as those of one attention head must
    gather:   does every rank get the outputs of all?

    Reference: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019, https://arxiv.org/abs/1909.08053
    """

    packed: int = 1
    together: int = 1
    gather: bool = False


@dataclass(frozen=True, kw_only=True)
class Rowwise:
    """Each rank has some of a Linear's inputs, which a Colwise one before has left there, and all add up the outputs.

    Of an Embedding: some of its rows, the vocabulary's. Reference: as `Colwise`.
    """


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Every rank has the module whole and computes its own heads or features with it: a norm of each head's queries.

    Its parameters' gradients are parts of a sum, which is what DTensor calls partial: they are added up over the ranks.
    """


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Under sequence parallelism the module computes each rank's own positions: a norm, or dropout, between layers.

    Without it the module is whole, as one that no plan names. Reference: Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models", MLSys 2023, https://arxiv.org/abs/2205.05198
    """


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Under sequence parallelism each rank takes its own positions of what the module is handed: the first block.

    From here to a Colwise that gathers, a module is handed this rank's positions, and a Colwise gathers them: a model
    must take its sizes from what a layer returns, not from what it is given. Its first argument is (batch, positions,
    features). Reference: as `Sequence`.
    """


Way = Colwise | Rowwise | Partial | Sequence | Scatter
Plan = Mapping[str, "Way | str"]  # by the names of modules, of which `*` stands for one part: "blocks.*.up"

# what transformers calls them in a model's `_tp_plan`
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
    """What a plan says of a module, as a Way; None where it is none that is known."""
    if isinstance(said, Way):
        return said
    return _SAID.get(said) if isinstance(said, str) else None
