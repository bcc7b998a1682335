"""The canonical state: one value of parameters, buffers and optimizer state, agreed on by all ranks.

Every strategy leaves into it and enters from it, so a live switch needs no knowledge of the pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.collectives import Wire
from workbench.engine.layout import Layout, fingerprint


class Disagreement(RuntimeError):
    """Ranks that should hold the same state do not."""


def all_equal(wire: Wire | None, number: int) -> list[int]:
    """Every rank's `number`, by rank."""
    if wire is None:
        return [number]
    mine = torch.tensor([number], dtype=torch.int64)
    out = torch.empty(wire.size, dtype=torch.int64)
    wire.wait(wire.all_gather(out, mine))
    return out.tolist()


def check_equal(wire: Wire | None, number: int, what: str) -> None:
    """Raises Disagreement naming the ranks whose `number` differs from rank 0's."""
    numbers = all_equal(wire, number)
    odd = [r for r, n in enumerate(numbers) if n != numbers[0]]
    if odd:
        raise Disagreement(f"{what} of rank {', '.join(map(str, odd))} differ from rank 0's")


def broadcast_model(wire: Wire | None, layout: Layout, model: nn.Module) -> None:
    """Rank 0's parameters and buffers everywhere."""
    if wire is None:
        return
    frozen = [p.data for p in model.parameters() if not p.requires_grad]
    for x in [*layout.weights.values(), *frozen, *model.buffers()]:
        flat = x.detach().contiguous().view(-1)
        if flat.numel():
            wire.wait(wire.broadcast(flat, 0))
            x.copy_(flat.view(x.shape))


def optimizer_tensors(layout: Layout, optimizer: Any) -> list[Tensor]:
    """The optimizer's floating-point state in an order that is the same on all ranks."""
    found = []
    for place in layout.order:
        slots = optimizer.state.get(place.param, {})
        found += [slots[k] for k in sorted(slots) if isinstance(slots[k], Tensor) and slots[k].is_floating_point()]
    return found


def prime(layout: Layout, optimizer: Any) -> None:
    """Gives an optimizer that has never stepped the state that it would have: on a rank that did not train."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for place in layout.order:
        place.param.grad = torch.zeros_like(place.param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def buffers(model: nn.Module) -> list[Tensor]:
    """The running statistics and the like that can be averaged."""
    return [b for b in model.buffers() if b.is_floating_point()]


def flattened(tensors: list[Tensor]) -> Tensor:
    """One fp32 vector of them all: a hand-over tensor by tensor takes ten times as long."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors]) if tensors else torch.zeros(0)


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Writes what `flattened` made back into the tensors."""
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view(t.shape))
        at += t.numel()


def state_hash(layout: Layout) -> int:
    """A hash of all trainable parameters."""
    return fingerprint(layout.weights.values())


@contextmanager
def mean_model(wire: Wire | None, layout: Layout, model: nn.Module) -> Iterator[float]:
    """Inside, the model is the mean of all ranks' models; yields this rank's RMS distance from it."""
    if wire is None:
        yield 0.0
        return
    kept, squares = [], 0.0
    for x in [*layout.weights.values(), *buffers(model)]:
        mean = x.detach().clone()
        if mean.numel() == 0:
            continue
        wire.wait(wire.all_reduce(mean.view(-1)))
        mean.div_(wire.size)
        kept.append((x, x.detach().clone()))
        x.data.copy_(mean)
    for x, own in kept[: len(layout.weights)]:
        squares += float((x - own).float().square().sum())
    try:
        yield (squares / max(1, layout.numel)) ** 0.5
    finally:
        for x, own in kept:
            x.data.copy_(own)
