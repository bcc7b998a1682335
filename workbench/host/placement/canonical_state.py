"""The canonical state: parameters, buffers and optimizer state in an order that all ranks share.

Every strategy leaves into it and enters from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.host.placement.checksum import compute_checksum
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import as_real, can_average


class RankDisagreement(RuntimeError):
    """Ranks that should hold the same state do not. On real ranks it arrives as a RankError.

    What to do: look for a source of differences, such as random numbers in a task. `precise=True` checks collectives.
    """


def check_same(numbers: Sequence[int], what: str, names: Sequence[int] = ()) -> None:
    """Raises RankDisagreement that names the ranks that differ from the first.

    names: the ranks' numbers in the run; empty: their indices
    """
    names = names or range(len(numbers))
    odd = [r for r, n in zip(names, numbers, strict=True) if n != numbers[0]]
    if odd:
        raise RankDisagreement(f"{what} of rank {', '.join(map(str, odd))} differ from rank {names[0]}'s")


def list_optimizer_tensors(layout: ParameterLayout, optimizer: Optimizer) -> list[Tensor]:
    """Returns the optimizer state that can be averaged, in one order on all ranks."""
    found = []
    for place in layout.order:
        slots = optimizer.state.get(place.param, {})
        found += [slots[k] for k in sorted(slots) if isinstance(slots[k], Tensor) and can_average(slots[k].dtype)]
    return found


def create_optimizer_state(layout: ParameterLayout, optimizer: Optimizer) -> None:
    """Creates missing optimizer state by a step with zero gradients and a zero rate."""
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


def sum_rows(rows: Tensor) -> Tensor:
    """Sums the ranks' rows (p, n) to (n,) in rank order, bit-identical on all ranks.

    `rows.sum(0)` adds in another order from 8 rows on.
    """
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def clip_gradients(layout: ParameterLayout, longest: float, of_replica: Callable[[float], float] = float) -> float:
    """Returns the gradients' norm, and scales them down to at most `longest`.

    of_replica: turns this rank's sum of squares into its replica's
    """
    params = [place.param for place in layout.order]
    own = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    norm = own if of_replica is float else own.new_tensor(of_replica(float(own) ** 2) ** 0.5)
    nn.utils.clip_grads_with_norm_(params, longest, norm)
    return float(norm)


def list_buffers(model: nn.Module) -> list[Tensor]:
    """Returns the buffers that can be averaged."""
    return [b for b in model.buffers() if can_average(b.dtype)]


def flatten_tensors(tensors: list[Tensor]) -> Tensor:
    """Returns one real vector of all tensors, in fp32 or their widest dtype.

    A hand-over tensor by tensor takes 10 times as long.
    """
    tensors = [as_real(t.detach()) for t in tensors]
    widest = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    if any(t.is_meta for t in tensors):
        return torch.empty(sum(t.numel() for t in tensors), dtype=widest, device="meta")
    if not tensors:
        return torch.zeros(0)
    where = max(tensors, key=Tensor.numel).device  # an optimizer's counters stay on the host
    return torch.cat([t.reshape(-1).to(where, widest) for t in tensors])


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Writes a vector of `flatten_tensors` back."""
    if flat.is_meta:
        return
    at = 0
    with torch.no_grad():
        for t in map(as_real, tensors):
            t.copy_(flat[at : at + t.numel()].view(t.shape))
            at += t.numel()


def hash_model_state(layout: ParameterLayout) -> int:
    """Hashes the trainable parameters; 0 without values."""
    return compute_checksum({place.name: place.param for place in layout.order})
