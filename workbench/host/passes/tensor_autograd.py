"""Meetings of tensor-parallel ranks in the middle of a pass: Megatron-LM's f, g and more.

f precedes a Colwise layer and sums gradients in backward only. g follows a Rowwise layer and sums outputs in forward
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.host.passes.coded_exchange import (
    GroupPeers,
    MeetingKind,
    cut_parts,
    exchange_tensor,
    gather_payloads,
    join_payloads,
    list_choices,
    mask_gradient,
)
from workbench.rank import Rank

NO_MEETING = MeetingKind("", "")
PARTIAL_NAME = "gradient partial"  # partial gradients' sum


class _GroupMeeting(torch.autograd.Function):
    """`ahead` is in forward, `back` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: GroupPeers, ahead: MeetingKind, back: MeetingKind) -> Tensor:
        ctx.meeting = others, ahead, back
        made, payload = exchange_tensor(x, others, ahead, others.coding.there)
        ctx.save_for_backward(*list_choices(payload, others.coding, others.ways if ahead.what == "scatter" else 1))
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        others, ahead, back = ctx.meeting
        came = exchange_tensor(grad, others, back, others.coding.back)[0] if back.what else grad
        return mask_gradient(came, ctx.saved_tensors, others.coding, ahead.dim), None, None, None


def _apply_meeting(x: Tensor, others: GroupPeers, ahead: MeetingKind, back: MeetingKind) -> Tensor:
    made: Tensor = _GroupMeeting.apply(x, others, ahead, back)  # type: ignore[no-untyped-call]
    return made


def sum_forward(x: Tensor, others: GroupPeers, name: str) -> Tensor:
    """g: sums over ranks. Each rank gets the same gradient."""
    return _apply_meeting(x, others, MeetingKind("sum", f"activation {name}"), NO_MEETING)


def sum_backward(x: Tensor, others: GroupPeers, name: str) -> Tensor:
    """f: sums the gradients of an `x` that is equal on all ranks."""
    return _apply_meeting(x, others, NO_MEETING, MeetingKind("sum", f"gradient {name}"))


def gather_features(x: Tensor, others: GroupPeers, name: str) -> Tensor:
    """Concatenates features. In backward each rank keeps its part."""
    return _apply_meeting(
        x, others, MeetingKind("gather", f"activation {name}"), MeetingKind("own", f"gradient {name}")
    )


class _GatheredLinear(torch.autograd.Function):
    """Keeps only this rank's positions, or their payload. Gathers again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, others: GroupPeers, name: str) -> Tensor:
        ctx.layer = others, name, bias is not None, x.shape, x.dtype
        every, payload = exchange_tensor(x, others, MeetingKind("gather", f"activation {name}", 1), others.coding.there)
        ctx.save_for_backward(weight, *(payload or (x,)))
        return F.linear(every, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        (weight, *kept), (others, name, biased, shape, dtype) = ctx.saved_tensors, ctx.layer
        (there, back, _), again = others.coding, MeetingKind("gather", f"activation {name} again", 1)
        if there is None:
            every = others.ask(again, kept[0])
        else:
            like = kept[0].new_empty(shape, dtype=dtype)
            every = join_payloads(gather_payloads(tuple(kept), others, again), like, others, again, there)
        every = every.to(grad.dtype).flatten(0, -2)
        own, _ = exchange_tensor(
            grad @ weight.to(grad.dtype), others, MeetingKind("scatter", f"gradient {name}", 1), back
        )
        if there is not None:
            own = mask_gradient(own, list_choices(tuple(kept), others.coding, 1), others.coding, 1)
        flat = grad.flatten(0, -2)
        of_bias = flat.sum(0).to(weight.dtype) if biased else None
        return own.to(dtype), (flat.t() @ every).to(weight.dtype), of_bias, None, None


def apply_gathered_linear(x: Tensor, module: Any, others: GroupPeers, name: str) -> Tensor:
    """Applies a Linear to all ranks' positions. Each rank gets the summed gradient of its own."""
    made: Tensor = _GatheredLinear.apply(x, module.weight, module.bias, others, name)  # type: ignore[no-untyped-call]
    return made


def scatter_sum(x: Tensor, others: GroupPeers, name: str) -> Tensor:
    """Sums over ranks and keeps this rank's positions. Backward gathers."""
    return _apply_meeting(
        x, others, MeetingKind("scatter", f"activation {name}", 1), MeetingKind("gather", f"gradient {name}", 1)
    )


def take_positions(x: Tensor, others: GroupPeers, name: str) -> Tensor:
    """Keeps this rank's positions of an equal `x`. Backward gathers."""
    return _apply_meeting(
        x, others, MeetingKind("own", f"activation {name}", 1), MeetingKind("gather", f"gradient {name}", 1)
    )


class _GradientSum(torch.autograd.Function):
    """Sums gradients. Create it before modules read the parameters: autograd runs the newest node first."""

    @staticmethod
    def forward(ctx: Any, others: GroupPeers, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.others = others
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        came = [grad for grad in grads if grad is not None]  # all ranks have read the same parameters
        for dtype in dict.fromkeys(grad.dtype for grad in came):
            some = [k for k, grad in enumerate(came) if grad.dtype == dtype]
            flat = torch.cat([came[k].reshape(-1) for k in some])
            flat = ctx.others.ask(MeetingKind("sum", PARTIAL_NAME), flat)
            parts = flat.split([came[k].numel() for k in some])
            for k, part in zip(some, parts, strict=True):
                came[k] = part.view(came[k].shape)
        found = iter(came)
        return None, *(None if grad is None else next(found) for grad in grads)


def sum_gradients_at_end(params: Sequence[Tensor], others: GroupPeers) -> tuple[Tensor, ...]:
    """Returns views to read in place of the parameters. One meeting sums all their gradients.

    Autograd runs the newest ready node. So each view is a node, and the last parameter's gradient arrives first.
    """
    made: tuple[Tensor, ...] = _GradientSum.apply(others, *(p.view_as(p) for p in params))  # type: ignore[no-untyped-call]
    return made


async def perform_meeting(rank: Rank, meeting: MeetingKind, x: Tensor) -> Tensor:
    """Uses `rank`'s collectives."""
    if meeting.what == "own":
        return cut_parts(x, rank.size, meeting)[rank.index].clone()
    if meeting.what == "scatter":
        parts = cut_parts(x.detach(), rank.size, meeting)
        shard: Tensor = await rank.reduce_scatter(torch.stack(parts).view(-1), meeting.name)
        return shard.view(parts[0].shape)
    flat = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
    if meeting.what == "swap":
        rows: Tensor = await rank.all_to_all(flat.view(rank.size, -1), meeting.name)
        return rows.view(x.shape)
    if meeting.what == "sum":
        await rank.all_reduce(flat, "sum", meeting.name)
        return flat.view(x.shape)
    return torch.cat(list((await rank.all_gather(flat, meeting.name)).view(rank.size, *x.shape)), meeting.dim)
