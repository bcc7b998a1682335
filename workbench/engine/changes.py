"""Applying a change between two steps, the same on every rank, and the hand-over of a change of strategy.

Leaving brings every rank to the canonical state (one value of parameters and optimizer state), entering starts
from it; so S strategies need 2 S adapters and not S squared. Afterwards a hash of the parameters must agree.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.compressors import Dense, ErrorFeedback
from workbench.engine.canonical import (
    all_equal,
    buffers,
    check_equal,
    flattened,
    optimizer_tensors,
    prime,
    scatter_back,
    state_hash,
)
from workbench.engine.opaque import unwrap, wrap
from workbench.experiment import Experiment
from workbench.tasks import at_rate


def apply(run: Any, wanted: Experiment) -> None:
    """Makes `run` (a Session) go on as `wanted` says; the ranks stand at the same step boundary."""
    was, run.experiment = run.experiment, wanted
    set_fabric(run, was, wanted)
    if wanted.lr != was.lr:
        at_rate(run.host.optimizer, wanted.lr)
        run.rank.lr = wanted.lr
    if wanted.batch != was.batch:
        run.restart_data()
    if wanted.bucket_mb != was.bucket_mb:
        run.layout.rebucket(wanted.bucket_mb)
        run.mark_buckets()
    if needs_switch(was.strategy, wanted.strategy):
        switch(run, was, wanted)
    elif wanted.compressor != was.compressor:
        set_compressor(run, was, wanted)
    elif wanted.strategy.opaque and (wanted.bucket_mb, wanted.fabric) != (was.bucket_mb, was.fabric):
        leave_opaque(run)
        enter_opaque(run)
    choose_lane(run)


def needs_switch(was: Any, wanted: Any) -> bool:
    """Is `wanted` another way for ranks to agree? A background remembers by its knobs, so a turned one is new."""
    return type(wanted) is not type(was) or (wanted != was and bool(wanted.has_background))


def set_fabric(run: Any, was: Experiment | None, wanted: Experiment) -> None:
    """The Link, the pace and the faults; a fault that is new may stand its rank still."""
    run.port.fabric = wanted.fabric
    run.host.pace.seconds = wanted.pace * 1e-3
    run.host.pace.faults = wanted.fabric.faults
    old = list(was.fabric.faults) if was else []
    for fault in wanted.fabric.faults:
        if fault in old:
            old.remove(fault)
        elif seconds := fault.pause(run.rank.index):
            run.pending_pause += seconds


def choose_lane(run: Any) -> None:
    """Children run on the caller's thread where a thread would have nothing to compute or sleep for."""
    compressor = run.rank.compressor
    run.lane.eager = compressor.immediate and not run.lane.shaper.active


def set_compressor(run: Any, was: Experiment | None, wanted: Experiment) -> None:
    """A residual that the new compressor would not feed back is sent once, uncompressed, and then gone."""
    run.rank.compressor = wanted.compressor
    run.flushing = False
    if was is not None and has_residual(run) and not remembers(wanted.compressor):
        run.rank.compressor = ErrorFeedback(of=Dense())
        run.flushing = True


def flushed(run: Any) -> None:
    """The residual has been sent: the compressor that was asked for takes over."""
    run.flushing = False
    run.rank.memory.drop(ErrorFeedback.slot)
    run.rank.compressor = run.experiment.compressor
    choose_lane(run)


def remembers(compressor: Any) -> bool:
    """Does `compressor`, or what it wraps, feed a residual back?"""
    while compressor is not None:
        if isinstance(compressor, ErrorFeedback):
            return True
        compressor = getattr(compressor, "of", None)
    return False


def has_residual(run: Any) -> bool:
    return ErrorFeedback.slot in run.rank.memory.slots


def switch(run: Any, was: Experiment, wanted: Experiment) -> None:
    """Leave, consolidate, enter, check. Its bytes cross the Link and it is one span of its own."""
    began = run.clock.now()
    run.host.op = f"switch from {was.strategy} to {wanted.strategy}"
    sent = run.lane.sent
    if in_step(was, run.rank.size):
        run.meeting.latest = run.rank.step
    run.rank.step = run.meeting.latest  # those that fell behind go on with the step of the first
    if was.strategy.opaque:
        leave_opaque(run)
    else:
        run.host.drive(was.strategy.leave(run.rank, run.state))
        if was.strategy.periodic:
            share_optimizer(run, was)
    drop_foreign_residual(run, was, wanted)
    set_compressor(run, was, wanted)
    run.host.forget_hooks()
    if wanted.strategy.opaque:
        enter_opaque(run)
    run.state = wanted.strategy.init(run.rank)
    run.meeting.enter()
    check_equal(run.control, state_hash(run.layout), "after the switch the parameters")
    run.record.span(run.rank.step, "switch", type(wanted.strategy).__name__, began, began, run.clock.now(),
                    run.lane.sent - sent)


def in_step(e: Experiment, size: int) -> bool:
    """Have all ranks a step in common, whether they meet in it or wait for neighbours or a server only?"""
    return e.strategy.lockstep or e.strategy.heard(size) > 0


def drop_foreign_residual(run: Any, was: Experiment, wanted: Experiment) -> None:
    """A residual of gradients means nothing among displacements: it is dropped, and the record says how much."""
    if has_residual(run) and was.strategy.exchanges != wanted.strategy.exchanges:
        pieces = run.rank.memory.slots[ErrorFeedback.slot].values()
        norm = sum(float(p.float().square().sum()) for p in pieces) ** 0.5
        run.rank.memory.drop(ErrorFeedback.slot)
        run.mark("residual", {"dropped": norm, "unit": was.strategy.exchanges})


def adopt(run: Any, names: list[str]) -> None:
    """Rank 0's order of gradients on all ranks, once, as torch's DDP rebuilds its buckets once."""
    index = {p.name: i for i, p in enumerate(run.layout.order)}
    order = torch.tensor([index[n] for n in names], dtype=torch.int64)
    if run.control is not None:
        if run.tickets.asked:
            run.pocket = run.tickets.take()
        run.control.wait(run.control.broadcast(order, 0))
    run.host.forget_hooks()
    run.layout.reorder([run.layout.order[i].name for i in order.tolist()])
    run.mark_buckets()


def share_optimizer(run: Any, was: Experiment) -> None:
    """The mean of the trainers' optimizer states everywhere: diverged momenta would pull replicas apart again."""
    if run.rank.size == 1:
        return
    trainers = sum(was.strategy.trains(r, run.rank.size) for r in range(run.rank.size))
    sizes = all_equal(run.control, sum(t.numel() for t in optimizer_tensors(run.layout, run.host.optimizer)))
    if sizes[run.rank.index] < max(sizes):
        prime(run.layout, run.host.optimizer)
    tensors = optimizer_tensors(run.layout, run.host.optimizer) + buffers(run.host.model)
    check_equal(run.control, sum(t.numel() for t in tensors), "sizes of the optimizer state")
    flat = flattened(tensors).mul_(run.rank.role == "trainer").div_(trainers)
    if flat.numel():
        run.host.drive(_sum(run.rank, flat))
        with torch.no_grad():
            scatter_back(flat, tensors)


async def _sum(rank: Any, flat: torch.Tensor) -> None:
    await rank.all_reduce(flat, "sum", "optimizer state")


def enter_opaque(run: Any) -> None:
    """Wraps the model in torch's own DDP; on an emulated Link its buckets go over our lane."""
    if run.rank.size == 1:
        return
    lane = run.lane if run.lane.shaper.active else None
    run.host.module = wrap(run.host.model, run.data_wire, run.experiment.bucket_mb, lane)


def leave_opaque(run: Any) -> None:
    if run.host.module is not run.host.model:
        unwrap(run.host.module)
        run.host.module = run.host.model


__all__ = ["apply", "choose_lane", "enter_opaque", "flushed", "set_compressor", "set_fabric", "switch"]
