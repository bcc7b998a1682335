"""The optimizer's momentum while a compressor keeps it: who may, the way there and back, and the steps in between.

What goes over is a running sum of gradients, as torch's SGD keeps it. The ranks' shares of it, in the compressor's
memory, add up to it. What weight decay adds stays with the optimizer, which is not asked about anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workbench.bucket import MOMENTUM, Memory
from workbench.canonical import flattened
from workbench.compressors import inside
from workbench.optimizers import TaskOwn

if TYPE_CHECKING:
    from workbench.changes import Changing
    from workbench.experiment import Experiment
    from workbench.layout import Layout, Place


def refused(e: Experiment, made: Callable[[], Any] | None = None) -> str | None:
    """Why `e`'s compressor cannot keep the momentum, in a sentence that says what would do; or None.

    made: makes `e`'s optimizer for its model; without it nothing is said of a task's own, which shows only then.
    """
    name = next((type(c).__name__ for c in inside(e.compressor) if c.carries), None)
    if name is None:
        return None
    if e.strategy.exchanges != "gradients":
        return (
            f"compressor={name}: it keeps a momentum of gradients, and {type(e.strategy).__name__} exchanges "
            f"{e.strategy.exchanges}; use DDP with it, or {name}(momentum=0)"
        )
    if made is None:
        if isinstance(e.optimizer, TaskOwn):
            return None
        made = _tried(e)
    if plain(optimizer := made()):
        return None
    kind = "Nesterov's" if any(g.get("nesterov") for g in optimizer.param_groups) else type(optimizer).__name__
    return (
        f"compressor={name}: it keeps the momentum itself, and {kind} is no plain sum of gradients that could be "
        f"handed over; use optimizer=SGD() with it, or {name}(momentum=0)"
    )


def _tried(e: Experiment) -> Callable[[], Any]:
    one = [torch.nn.Parameter(torch.zeros(1))]
    return lambda: e.optimizer.make(one, 1.0, lambda lr: torch.optim.SGD(one, lr))


def plain(optimizer: Any) -> bool:
    """Is its momentum, if it has one, a running sum of gradients and of what weight decay adds to them?"""
    odd = ("nesterov", "dampening", "maximize")
    return type(optimizer) is torch.optim.SGD and not any(g[name] for g in optimizer.param_groups for name in odd)


def stilled(layout: Layout, optimizer: Any, memory: Memory) -> None:
    """After a step: takes its gradients out of the optimizer's momentum, where a compressor keeps that of gradients."""
    kept = memory.slots.get(MOMENTUM)
    if not kept or not plain(optimizer):
        return
    params = [place.param for place in layout.order if place.name in kept]
    buffers = [(optimizer.state.get(p, {}).get("momentum_buffer"), p.grad) for p in params]
    pairs = [(buffer, grad) for buffer, grad in buffers if buffer is not None and grad is not None]
    if pairs:
        torch._foreach_sub_(*map(list, zip(*pairs, strict=True)))


async def hand_over(run: Changing) -> None:
    """The momentum goes where it is kept from now on: into the compressor's memory, or back. A Mark says so."""
    memory = run.rank.memory
    here = MOMENTUM in memory.slots
    wanted = any(c.carries for c in inside(run.rank.compressor))
    if wanted and not here:
        memory.slots[MOMENTUM] = {}
        _take(run)
    elif here and not wanted:
        await _give_back(run)
    else:
        return
    if run.rank.index == 0:
        run.mark("momentum", {"text": f"the momentum is kept by the {'compressor' if wanted else 'optimizer'}"})


def _take(run: Changing) -> None:
    """Every rank's share of the optimizer's momentum goes into its compressor's memory."""
    for place in run.layout.order:
        buffer = run.optimizer.state.get(place.param, {}).get("momentum_buffer")
        if buffer is not None and not buffer.is_meta and plain(run.optimizer):
            run.rank.memory.slots[MOMENTUM][place.name] = buffer.reshape(-1) / run.rank.size
            buffer.zero_()


async def _give_back(run: Changing) -> None:
    """The sum of what all ranks keep is added to the optimizer's momentum, if it has one. Crosses uncompressed."""
    kept = run.rank.memory.slots[MOMENTUM]
    places = [place for place in run.layout.order if place.name in kept]
    flat = flattened([kept[place.name] for place in places])
    run.rank.memory.drop(MOMENTUM)
    if not flat.numel():
        return
    await run.rank.all_reduce(flat, "sum", "momentum")
    if flat.is_meta or not plain(run.optimizer):
        return
    has = {p for group in run.optimizer.param_groups for p in group["params"] if group["momentum"]}
    for place, piece in zip(places, flat.split([place.numel for place in places]), strict=True):
        if place.param in has:
            _add(run.optimizer.state[place.param], place, piece)


def _add(state: Any, place: Place, piece: torch.Tensor) -> None:
    """Adds (n,) to the momentum of one parameter."""
    piece = piece.view(place.param.shape).to(place.param.dtype)
    buffer = state.get("momentum_buffer")
    state["momentum_buffer"] = piece.clone() if buffer is None else buffer.add_(piece)
