"""The canonical state: one value of parameters, buffers and optimizer state, as tensors in an order all ranks share.

Every strategy leaves into it and enters from it, so a live switch needs no knowledge of the pair. Both hosts read
it here; how ranks come to agree on it is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.placement.checksum import checksum
from workbench.host.placement.layout import Layout
from workbench.rank import as_real, can_average


class Disagreement(RuntimeError):
    """Ranks that should hold the same state do not."""


def check_same(numbers: Sequence[int], what: str, names: Sequence[int] = ()) -> None:
    """Raises Disagreement naming the ranks whose number differs from the first rank's.

    names: the number in the run of the rank with each of `numbers`; (): its index
    """
    names = names or range(len(numbers))
    odd = [r for r, n in zip(names, numbers, strict=True) if n != numbers[0]]
    if odd:
        raise Disagreement(f"{what} of rank {', '.join(map(str, odd))} differ from rank {names[0]}'s")


def optimizer_tensors(layout: Layout, optimizer: Any) -> list[Tensor]:
    """The optimizer's state that can be averaged, in an order that is the same on all ranks."""
    found = []
    for place in layout.order:
        slots = optimizer.state.get(place.param, {})
        found += [slots[k] for k in sorted(slots) if isinstance(slots[k], Tensor) and can_average(slots[k].dtype)]
    return found


def prime(layout: Layout, optimizer: Any) -> None:
    """Gives an optimizer the state that it would have of what it has never stepped: on a rank that did not train it."""
    new = [place.param for place in layout.order if not optimizer.state.get(place.param)]
    if not new:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for param in new:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def added_up(rows: Tensor) -> Tensor:
    """(p, n) -> (n,): the sum of the ranks' rows in the order of the ranks, so that all who add them get the same bits;
    `rows.sum(0)` takes another order from eight rows on.
    """
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def clipped(layout: Layout, longest: float, of_replica: Callable[[float], float] = float) -> float:
    """The norm of all gradients together; where it is above `longest` they are scaled down to it first.

    of_replica: makes of this rank's sum of squares that of its whole replica
    """
    params = [place.param for place in layout.order]
    own = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    norm = own if of_replica is float else own.new_tensor(of_replica(float(own) ** 2) ** 0.5)
    nn.utils.clip_grads_with_norm_(params, longest, norm)
    return float(norm)


def buffers(model: nn.Module) -> list[Tensor]:
    """The running statistics and the like that can be averaged."""
    return [b for b in model.buffers() if can_average(b.dtype)]


def flattened(tensors: list[Tensor]) -> Tensor:
    """One real vector of them all, fp32 or wider if one is: a hand-over tensor by tensor takes ten times as long."""
    tensors = [as_real(t.detach()) for t in tensors]
    widest = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    if any(t.is_meta for t in tensors):
        return torch.empty(sum(t.numel() for t in tensors), dtype=widest, device="meta")
    if not tensors:
        return torch.zeros(0)
    where = max(tensors, key=Tensor.numel).device  # on a GPU an optimizer's counters lie with the host
    return torch.cat([t.reshape(-1).to(where, widest) for t in tensors])


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Writes what `flattened` made back into the tensors."""
    if flat.is_meta:
        return
    at = 0
    with torch.no_grad():
        for t in map(as_real, tensors):
            t.copy_(flat[at : at + t.numel()].view(t.shape))
            at += t.numel()


def state_hash(layout: Layout) -> int:
    """A hash of all trainable parameters; 0 where they are sizes only."""
    return checksum({place.name: place.param for place in layout.order})
