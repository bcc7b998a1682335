"""Applying a change between two steps, the same on every rank and every host, and the hand-over between strategies.

A hand-over asks for the same verbs as a step, so it is a coroutine, too, and a host drives it. Leaving brings every
rank to the canonical state (one value of parameters and optimizer state), entering starts from it; so S strategies
need 2 S adapters and not S squared. Afterwards a hash of the parameters must agree.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.canonical import buffers, check_same, flattened, optimizer_tensors, prime, scatter_back, state_hash
from workbench.compressors import ErrorFeedback, inside
from workbench.compressors._leaving import _Leaving as Leaving
from workbench.compressors._sketch import SIGNS, WIDTH, sketch
from workbench.experiment import Experiment
from workbench.momentum import hand_over
from workbench.ops import Part, Rank
from workbench.optimizers import carry
from workbench.rates import Rate
from workbench.tasks import at_rate, rate

LONG = 3.0  # times a gradient's length: a residual that is sent at once and is longer makes a step worth a warning


class Changing(Protocol):
    """One rank of a run as a change sees it; each host has one."""

    experiment: Experiment
    rank: Rank
    state: Any  # what the strategy remembers
    flushing: int  # uncompressed steps still to make, in which a residual is sent that nothing feeds back any more
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
        await _change_compressor(run, was, wanted)
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


def begin(run: Changing) -> None:
    """The compressor that a run begins with."""
    run.rank.compressor, run.flushing = run.experiment.compressor, 0


async def _change_compressor(run: Changing, was: Experiment, wanted: Experiment, foreign: bool = False) -> None:
    """Another compressor takes over, at once or when what the one before owes is settled.

    One that keeps what is owed in the same place goes on with it. Else the one that is left says what becomes of it:
    its `whole` sends it in one step, and error feedback may take several, or none (`off`). One that is asked for in
    the meantime changes nothing about that. What is owed and `foreign` to what is exchanged from now on is dropped.
    """
    left, present = _feeding(was.compressor), run.rank.compressor
    steps = run.flushing if isinstance(present, Leaving) else 0
    begin(run)
    if foreign:
        for slot in sorted({c.owes for c in (*inside(was.compressor), *inside(present)) if c.owes}):
            _dropped(run, was, slot, await _owed(run, slot))
        return
    kept = {"", ErrorFeedback.slot, *(c.owes for c in inside(wanted.compressor))}
    others = [c for c in (*inside(present), *inside(was.compressor)) if c.owes not in kept]
    if others:
        run.rank.compressor, run.flushing = others[0].whole(), 1
        return
    if remembers(wanted.compressor):
        return run.rank.memory.drop(Leaving.asked)
    if not steps and left is not None:
        owed = await _owed(run, ErrorFeedback.slot)
        if ErrorFeedback.slot not in run.rank.memory.slots or (owed is not None and not owed.any()):
            return run.rank.memory.drop(ErrorFeedback.slot)
        off = getattr(left, "off", "flush")
        if off == "drop":
            return _dropped(run, was, ErrorFeedback.slot, owed)
        steps = left.over if off == "bleed" else 1
        if owed is not None:
            run.rank.memory.parts[Leaving.asked] = {"": owed}
    _send_on(run, steps)


def _send_on(run: Changing, steps: int) -> None:
    """So many uncompressed steps are to come; then the compressor that was asked for takes over."""
    run.flushing = steps
    run.rank.compressor = Leaving(share=1.0 / steps) if steps else run.experiment.compressor


async def flushed(run: Changing) -> None:
    """A step has sent its share of what was owed; after the last one whom it was asked for takes over."""
    sent = run.rank.compressor
    if isinstance(sent, Leaving):
        _tell_sent(run)
        _send_on(run, run.flushing - 1)
    else:
        begin(run)
    if not run.flushing:
        run.rank.memory.drop(sent.owes)
        await hand_over(run)
        run.choose_lane()


def _tell_sent(run: Changing) -> None:
    """After the first of these steps: how much is sent, in how many, and whether that makes long ones."""
    found = run.rank.memory.parts.pop(Leaving.asked, {})
    owed = found.pop("", None)
    if not found:
        return
    share = owed / run.flushing
    residual, gradient = float(owed.norm()), float((torch.stack(list(found.values())).sum(0) - share).norm())
    detail: dict[str, Any] = {"sent": residual, "gradient": gradient, "steps": run.flushing,
                              "unit": run.experiment.strategy.exchanges}
    if float(share.norm()) > LONG * gradient:
        times = f"{float(share.norm()) / gradient:.1f} times" if gradient else "infinitely many times"
        detail["text"] = (
            f"a step sent what compression had left unsent, {times} as long as its own gradient; "
            f"ErrorFeedback(off='bleed') would spread that over {'more' if run.flushing > 1 else 'several'} steps, "
            f"off='drop' would leave it out"
        )
    run.mark("residual", detail)


async def _owed(run: Changing, slot: str) -> Tensor | None:
    """A sketch of what all ranks together owe, from one small all-reduce; None where there are sizes only."""
    pieces = run.rank.memory.slots.get(slot, {})
    mine = torch.zeros(SIGNS * WIDTH, device=run.layout.order[0].param.device)
    if not mine.is_meta:
        mine = sum((sketch(piece, name) for name, piece in pieces.items()), mine)
    total = await run.rank.all_reduce(mine, "sum", "residual")
    return None if total.is_meta else total


def _dropped(run: Changing, was: Experiment, slot: str, owed: Tensor | None) -> None:
    """What is owed is forgotten, and the record says how much: this rank's own, and on rank 0 the mean's, in words."""
    pieces = list(run.rank.memory.slots.get(slot, {}).values())
    run.rank.memory.drop(slot)
    run.rank.memory.drop(Leaving.asked)
    if owed is None or not pieces:  # sizes only, or a rank that exchanges nothing: there is no norm to tell
        return
    norm = sum(float(p.float().square().sum()) for p in pieces) ** 0.5
    detail: dict[str, Any] = {"dropped": norm, "mean": float(owed.norm()), "unit": was.strategy.exchanges}
    if run.rank.index == 0:
        what = f"{was.strategy.exchanges} of length {detail['mean']:.3g}"
        detail["text"] = f"dropped what compression had left unsent: {what}"
    run.mark("residual", detail)


def remembers(compressor: Any) -> bool:
    """Does `compressor`, or what it wraps, feed a residual back?"""
    return _feeding(compressor) is not None


def _feeding(compressor: Any) -> Any:
    """What in `compressor` feeds a residual back, the outermost if there are several; or None."""
    return next((c for c in inside(compressor) if c.owes == ErrorFeedback.slot), None)


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
        await _change_compressor(run, was, wanted, _foreign(was, wanted))
        if wanted.strategy.opaque:
            run.enter_opaque()
        momentum = was.strategy.hands_on(run.rank, run.state)
        run.enter(was, wanted)
        wanted.strategy.takes(run.rank, run.state, momentum)
        check_same(await run.gather(state_hash(run.layout)), "after the switch the parameters")


def _foreign(was: Experiment, wanted: Experiment) -> bool:
    """Does a residual lose its meaning? One of gradients has none among displacements.

    One of moments means nothing to others than those it was left by, which begin anew with every strategy.
    """
    kinds = {was.strategy.exchanges, wanted.strategy.exchanges}
    return len(kinds) > 1 or "moments" in kinds


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


def refuses_model(e: Experiment, parts: list[Part]) -> str | None:
    """Why a model of these parameters cannot be trained as `e` says, in a sentence that says what would do; or None."""
    said = [e.strategy.refuses_model(parts), *(c.refuses_model(parts) for c in inside(e.compressor))]
    return next((reason for reason in said if reason), None)


def in_step(e: Experiment) -> bool:
    """Have all ranks a step in common, whether they meet in it or wait for neighbours or a server only?"""
    return e.strategy.lockstep or e.strategy.heard(e.ranks) > 0


__all__ = ["Changing", "apply", "begin", "flushed", "in_step", "needs_switch", "refuses_model", "remembers"]
