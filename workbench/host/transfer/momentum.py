"""Moves the optimizer's momentum into a compressor's memory and back.

The momentum is a running sum of gradients, as in torch's SGD. The ranks' shares in their compressors' memories add up
to it. The part from weight decay stays in the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from workbench.compressors import inside
from workbench.experiment.momentum_rules import is_plain_momentum
from workbench.host.placement.canonical_state import flatten_tensors
from workbench.host.transfer.change_view import ChangeView
from workbench.rank import MOMENTUM, Memory

if TYPE_CHECKING:
    from workbench.host.placement.bucket_groups import ParameterPlace
    from workbench.host.placement.parameter_layout import ParameterLayout


def subtract_gradients(layout: ParameterLayout, optimizer: Optimizer, memory: Memory) -> None:
    """Subtracts gradients from the optimizer's momentum if a compressor keeps it."""
    kept = memory.buffers.get(MOMENTUM)
    if not kept or not is_plain_momentum(optimizer):
        return
    params = [place.param for place in layout.order if place.name in kept]
    buffers = [(optimizer.state.get(p, {}).get("momentum_buffer"), p.grad) for p in params]
    pairs = [(buffer, grad) for buffer, grad in buffers if buffer is not None and grad is not None]
    if pairs:
        torch._foreach_sub_(*map(list, zip(*pairs, strict=True)))


async def move_momentum(run: ChangeView) -> None:
    """Moves the momentum if the new compressor needs it."""
    memory = run.rank.memory
    here = MOMENTUM in memory.buffers
    wanted = any(c.carries for c in inside(run.rank.compressor))
    if wanted and not here:
        memory.buffers[MOMENTUM] = {}
        _take_momentum(run)
    elif here and not wanted:
        await return_momentum(run)
    else:
        return
    if run.rank.id == 0:
        run.mark("momentum", {"text": f"the momentum is kept by the {'compressor' if wanted else 'optimizer'}"})


def _take_momentum(run: ChangeView) -> None:
    for place in run.layout.order:
        buffer = run.optimizer.state.get(place.param, {}).get("momentum_buffer")
        if buffer is not None and not buffer.is_meta and is_plain_momentum(run.optimizer):
            run.rank.memory.buffers[MOMENTUM][place.name] = buffer.reshape(-1) / run.rank.replicas.size
            buffer.zero_()


async def return_momentum(run: ChangeView) -> None:
    """Adds the uncompressed sum of shares to the optimizer's momentum."""
    kept = run.rank.memory.buffers[MOMENTUM]
    places = [place for place in run.layout.order if place.name in kept]
    flat = flatten_tensors([kept[place.name] for place in places])
    run.rank.memory.drop(MOMENTUM)
    if not flat.numel():
        return
    await run.rank.replicas.all_reduce(flat, "sum", "momentum")
    if flat.is_meta or not is_plain_momentum(run.optimizer):
        return
    has = {p for group in run.optimizer.param_groups for p in group["params"] if group["momentum"]}
    for place, piece in zip(places, flat.split([place.numel for place in places]), strict=True):
        if place.param in has:
            _add_momentum(run.optimizer.state[place.param], place, piece)


def _add_momentum(state: dict[str, Any], place: ParameterPlace, piece: torch.Tensor) -> None:
    piece = piece.view(place.param.shape).to(place.param.dtype)
    buffer = state.get("momentum_buffer")
    state["momentum_buffer"] = piece.clone() if buffer is None else buffer.add_(piece)
