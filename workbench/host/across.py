"""What crosses in the middle of a pass between ranks that have slices of each matrix: Megatron-LM's f and g, and more.

Before a layer by columns nothing happens forward and gradients are added up backward; after one by rows outputs are
added up forward and nothing happens backward. Whoever runs the pass says, as `ask`, how ranks meet: over a wire, on a
virtual clock, or all in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.rank import Rank, StrategyError


class Meeting(NamedTuple):
    """How the ranks' tensors become one answer for each.

    what: "sum", over all of them; "gather", one after the other along a dimension; "own", of a tensor that all have,
          this rank's part along it; "scatter", this rank's part of the sum; "" nothing
    name: of the module and of what meets: "activation blocks.0.mlp_out"
    """

    what: str
    name: str
    dim: int = -1


Ask = Callable[[Meeting, Tensor], Tensor]


class _Across(torch.autograd.Function):
    """A tensor on its way from one module to another, where ranks meet: forward so, and backward so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Ask, ahead: Meeting, back: Meeting) -> Tensor:
        ctx.ask, ctx.back = ask, back
        return ask(ahead, x) if ahead.what else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (ctx.ask(ctx.back, grad) if ctx.back.what else grad), None, None, None


def summed_ahead(x: Tensor, ask: Ask, name: str) -> Tensor:
    """g: what all ranks have added up, of which each gets the same gradient."""
    made: Tensor = _Across.apply(x, ask, Meeting("sum", f"activation {name}"), Meeting("", ""))
    return made


def summed_back(x: Tensor, ask: Ask, name: str) -> Tensor:
    """f: the same `x` on all ranks, whose gradients are added up."""
    made: Tensor = _Across.apply(x, ask, Meeting("", ""), Meeting("sum", f"gradient {name}"))
    return made


def gathered(x: Tensor, ask: Ask, name: str) -> Tensor:
    """The features of all ranks one after the other, on each; of the gradient every rank takes its own part."""
    made: Tensor = _Across.apply(x, ask, Meeting("gather", f"activation {name}"), Meeting("own", f"gradient {name}"))
    return made


class _Gathering(torch.autograd.Function):
    """A Linear of the positions of all ranks, which keeps for its backward this rank's own and gathers them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ask: Ask, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ask, ctx.name, ctx.biased = ask, name, bias is not None
        return F.linear(ask(Meeting("gather", f"activation {name}", 1), x), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        every = ctx.ask(Meeting("gather", f"activation {ctx.name} again", 1), x).to(grad.dtype).flatten(0, -2)
        own = ctx.ask(Meeting("scatter", f"gradient {ctx.name}", 1), grad @ weight.to(grad.dtype))
        flat = grad.flatten(0, -2)
        of_bias = flat.sum(0).to(weight.dtype) if ctx.biased else None
        return own.to(x.dtype), (flat.t() @ every).to(weight.dtype), of_bias, None, None


def linear_of_all(x: Tensor, module: Any, ask: Ask, name: str) -> Tensor:
    """What a Linear makes of the positions of all ranks; their gradients are added up, each rank's own."""
    made: Tensor = _Gathering.apply(x, module.weight, module.bias, ask, name)
    return made


def scattered_ahead(x: Tensor, ask: Ask, name: str) -> Tensor:
    """What all ranks have added up of this rank's own positions; the gradients of all come together again."""
    made: Tensor = _Across.apply(x, ask, Meeting("scatter", f"activation {name}", 1),
                                 Meeting("gather", f"gradient {name}", 1))  # fmt: skip
    return made


def taken(x: Tensor, ask: Ask, name: str) -> Tensor:
    """Of what all ranks have this rank's own positions; the gradients of all come together again."""
    made: Tensor = _Across.apply(x, ask, Meeting("own", f"activation {name}", 1),
                                 Meeting("gather", f"gradient {name}", 1))  # fmt: skip
    return made


async def met(rank: Rank, meeting: Meeting, x: Tensor) -> Tensor:
    """What a meeting of the ranks of a group answers this one."""
    if meeting.what == "own":
        return parts_of(x, rank.size, meeting)[rank.index].clone()
    if meeting.what == "scatter":
        parts = parts_of(x.detach(), rank.size, meeting)
        return (await rank.reduce_scatter(torch.stack(parts).view(-1), meeting.name)).view(parts[0].shape)
    flat = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
    if meeting.what == "sum":
        await rank.all_reduce(flat, "sum", meeting.name)
        return flat.view(x.shape)
    return torch.cat(list((await rank.all_gather(flat, meeting.name)).view(rank.size, *x.shape)), meeting.dim)


def parts_of(x: Tensor, count: int, meeting: Meeting) -> list[Tensor]:
    """`x` in so many equal parts along the dimension of a meeting. Raises StrategyError where it cannot be cut so."""
    if x.shape[meeting.dim] % count:
        raise StrategyError(
            f"{meeting.name}: {x.shape[meeting.dim]} positions cannot be dealt out to {count} ranks evenly; take "
            f"sequences of a multiple of {count}, or sequence=false"
        )
    return list(x.chunk(count, meeting.dim))
