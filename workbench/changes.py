"""Applying a change between two steps, the same on every rank and every host, and the hand-over between strategies.

A hand-over asks for the same verbs as a step, so it is a coroutine, too, and a host drives it. Leaving brings every
rank to the canonical state (one value of parameters and optimizer state), entering starts from it; so S strategies
need 2 S adapters and not S squared. Afterwards a hash of the parameters must agree.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from workbench.canonical import buffers, check_same, flattened, optimizer_tensors, prime, scatter_back, state_hash
from workbench.compressors import inside
from workbench.experiment import Experiment
from workbench.momentum import hand_over
from workbench.ops import Rank
from workbench.optimizers import carry
from workbench.rates import Rate
from workbench.tasks import at_rate, rate


class Changing(Protocol):
    """One rank of a run as a change sees it; each host has one."""

    experiment: Experiment
    rank: Rank
    state: Any  # what the strategy remembers
    flushing: bool
    rate: Rate

    @property
    def layout(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None: ...
    def make_optimizer(self, wanted: Experiment) -> Any: ...
    def use_optimizer(self, optimizer: Any) -> None: ...
    def choose_lane(self) -> None: ...
    def restart_data(self) -> None: ...
    async def rebucket(self, bucket_mb: float) -> None: ...
    def leave_opaque(self) -> None: ...
    def enter_opaque(self) -> None: ...
    def mark(self, name: str, detail: dict[str, Any]) -> None: ...
    def sample(self, name: str, value: float) -> None: ...
    def switching(self, was: Experiment, wanted: Experiment) -> Any: ...
    async def leave(self, strategy: Any) -> None: ...
    def enter(self, was: Experiment, wanted: Experiment) -> None: ...
    async def gather(self, number: int) -> list[int]: ...  # every rank's number, by rank


async def apply(run: Changing, wanted: Experiment) -> None:
    """Makes `run` go on as `wanted` says; the ranks stand at the same step boundary."""
    was = run.experiment
    if was.strategy.crosses:
        await was.strategy.settle(run.rank, run.state)
    run.experiment = wanted
    run.set_fabric(was, wanted)
    run.rate.turn(was, wanted, run.rank.step)
    if wanted.optimizer != was.optimizer:
        _renew(run, wanted)
    run.rate.follow(run)
    if wanted.batch != was.batch:
        run.restart_data()
    if wanted.bucket_mb != was.bucket_mb:
        await run.rebucket(wanted.bucket_mb)
    if needs_switch(was.strategy, wanted.strategy):
        await _switch(run, was, wanted)
    elif wanted.compressor != was.compressor:
        set_compressor(run, was, wanted)
    elif wanted.strategy.opaque and (wanted.bucket_mb, wanted.fabric) != (was.bucket_mb, was.fabric):
        run.leave_opaque()
        run.enter_opaque()
    if not run.flushing:
        await hand_over(run)
    run.choose_lane()


def _renew(run: Changing, wanted: Experiment) -> None:
    """Another optimizer takes over, at the present rate. A Mark says what it takes over of what the last remembered."""
    made = run.make_optimizer(wanted)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    moved = carry(run.optimizer, made)
    run.use_optimizer(made)
    if run.rank.index == 0:
        run.mark("optimizer", moved)


def needs_switch(was: Any, wanted: Any) -> bool:
    """Is `wanted` another way for ranks to agree? A background remembers by its knobs, so a turned one is new."""
    return type(wanted) is not type(was) or (wanted != was and bool(wanted.has_background))


def set_compressor(run: Changing, was: Experiment | None, wanted: Experiment) -> None:
    """What the compressor so far owes and the new one would not send is sent once, uncompressed, and then gone."""
    present = run.rank.compressor
    run.rank.compressor, run.flushing = wanted.compressor, False
    if was is None:
        return
    kept = {c.owes for c in inside(wanted.compressor)}
    for owing in _owing(run, present):
        if owing.owes not in kept:
            run.rank.compressor, run.flushing = owing.whole(), True


async def flushed(run: Changing) -> None:
    """What was owed has been sent: the compressor that was asked for takes over."""
    run.flushing = False
    run.rank.memory.drop(run.rank.compressor.owes)
    run.rank.compressor = run.experiment.compressor
    await hand_over(run)
    run.choose_lane()


def remembers(compressor: Any) -> bool:
    """Does `compressor`, or what it wraps, feed back what it has not sent?"""
    return any(c.owes for c in inside(compressor))


def _owing(run: Changing, compressor: Any) -> list[Any]:
    """Those in `compressor` that have not sent everything."""
    return [c for c in inside(compressor) if c.owes in run.rank.memory.slots]


async def _switch(run: Changing, was: Experiment, wanted: Experiment) -> None:
    """Leave, consolidate, enter, check. Its bytes cross the Link and it is one span of its own."""
    with run.switching(was, wanted):
        if wanted.lr_warmup and not in_step(was):
            await run.rate.agree(run)
        if was.strategy.opaque:
            run.leave_opaque()
        else:
            await run.leave(was.strategy)
            if was.strategy.periodic:
                await _share_optimizer(run, was)
        _drop_foreign_residual(run, was, wanted)
        set_compressor(run, was, wanted)
        if wanted.strategy.opaque:
            run.enter_opaque()
        momentum = was.strategy.hands_on(run.rank, run.state)
        run.enter(was, wanted)
        wanted.strategy.takes(run.rank, run.state, momentum)
        check_same(await run.gather(state_hash(run.layout)), "after the switch the parameters")


def _drop_foreign_residual(run: Changing, was: Experiment, wanted: Experiment) -> None:
    """A residual of gradients means nothing among displacements: it is dropped, and the record says how much.

    One of moments means nothing to others than those it was left by, which begin anew with every strategy.
    """
    kinds = {was.strategy.exchanges, wanted.strategy.exchanges}
    if len(kinds) == 1 and "moments" not in kinds:
        return
    for slot in {c.owes for c in _owing(run, run.rank.compressor)}:
        pieces = list(run.rank.memory.slots[slot].values())
        run.rank.memory.drop(slot)
        if any(p.is_meta for p in pieces):  # sizes only: there is no norm to tell
            continue
        norm = sum(float(p.float().square().sum()) for p in pieces) ** 0.5
        run.mark("residual", {"dropped": norm, "unit": was.strategy.exchanges})


async def _share_optimizer(run: Changing, was: Experiment) -> None:
    """The mean of the trainers' optimizer states everywhere: diverged momenta would pull replicas apart again."""
    size = run.rank.size
    if size == 1:
        return
    trainers = sum(was.strategy.trains(r, size) for r in range(size))
    numbers = await run.gather(sum(t.numel() for t in optimizer_tensors(run.layout, run.optimizer)))
    if numbers[run.rank.index] < max(numbers):
        prime(run.layout, run.optimizer)
    tensors = optimizer_tensors(run.layout, run.optimizer) + buffers(run.model)
    check_same(await run.gather(sum(t.numel() for t in tensors)), "sizes of the optimizer state")
    flat = flattened(tensors).mul_(run.rank.role == "trainer").div_(trainers)
    if flat.numel():
        await run.rank.all_reduce(flat, "sum", "optimizer state")
        with torch.no_grad():
            scatter_back(flat, tensors)


def in_step(e: Experiment) -> bool:
    """Have all ranks a step in common, whether they meet in it or wait for neighbours or a server only?"""
    return e.strategy.lockstep or e.strategy.heard(e.ranks) > 0


__all__ = ["Changing", "apply", "flushed", "in_step", "needs_switch", "remembers", "set_compressor"]
