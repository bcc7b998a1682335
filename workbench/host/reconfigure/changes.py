"""Applying a change between two steps, the same on every rank and every host, and the hand-over between strategies.

A hand-over asks for the same verbs as a step, so it is a coroutine, too, and a host drives it. Leaving brings every
rank to the canonical state (one value of parameters and optimizer state), entering starts from it; so S strategies
need 2 S adapters and not S squared. Afterwards a hash of the parameters must agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from workbench.experiment import Experiment
from workbench.experiment.arranged import mesh, sharers
from workbench.fabric.load import idle
from workbench.host.core.answers import Answer
from workbench.host.core.changing import Changing
from workbench.host.core.dealing import used_up
from workbench.host.core.remembered import names, tell
from workbench.host.passes.checkpointing import units_of
from workbench.host.passes.pipelining import drained
from workbench.host.passes.recomputing import recomputed
from workbench.host.placement.spread import spread_of
from workbench.host.reconfigure.refusing import moves
from workbench.host.transfer import handover, own, residual
from workbench.host.transfer.lying import WHOLE, Lying, lying, lying_then
from workbench.host.transfer.momentum import move_momentum
from workbench.host.transfer.recut import recut
from workbench.host.transfer.repartition import repartition
from workbench.host.transfer.tables import tables_of
from workbench.optimizers import carry
from workbench.rank import MOMENTUM
from workbench.settings import Change, KnobError, resolved
from workbench.tasks import at_rate, rate


async def obey(run: Changing, change: Change) -> bool:
    """Makes one change, on all ranks between the same two steps, or refuses it in words; the record says which.

    Was it made?
    """
    wanted, reason = None, ""
    try:
        wanted = _ready(run, run.able(run.experiment.set(change.path, change.value)))
    except KnobError as error:
        reason = str(error)
    refusing = await run.gather(int(wanted is None))  # one that cannot is enough
    if wanted is None or any(refusing):
        first = refusing.index(1)
        reason = reason or f"rank {run.rank.number(first)} cannot make it, and why was not heard"
        _answer(run, first, "refused", _refusal(change, reason))
        return False
    began, sent = run.now, run.sent
    await apply(run, wanted)
    nbytes, seconds = sum(await run.gather(run.sent - sent)), run.now - began
    _answer(run, 0, "change", {**change.plain(), "text": change.text, "nbytes": nbytes, "seconds": seconds})
    return True


async def refused(run: Changing, together: Sequence[Change]) -> Change | None:
    """Of changes that are to be made together the first that some rank cannot make, which the record then says."""
    wanted, mine, reason = run.experiment, 0, ""
    for number, change in enumerate(together, 1):
        try:
            wanted = run.able(resolved(wanted, change)[1])
        except KnobError as error:
            mine, reason = number, str(error)
            break
    refusing = await run.gather(mine)
    if not any(refusing):
        return None
    first = next(rank for rank, number in enumerate(refusing) if number)
    change = together[refusing[first] - 1]
    if run.rank.id == first:
        run.mark("refused", _refusal(change, reason))
    return change


def _refusal(change: Change, reason: str) -> dict[str, Any]:
    return {**change.plain(), **({"why": change.reason} if change.by else {}), "reason": reason}


def _answer(run: Changing, by: int, name: str, detail: dict[str, Any]) -> None:
    """What became of a change: one rank says it in the record, and all know it, for that one may be lost before."""
    run.answer = Answer(name, run.rank.step, run.now, detail)
    if run.rank.id == by:
        run.mark(name, detail)


def _ready(run: Changing, wanted: Experiment) -> Experiment:
    """`wanted`, or KnobError where it must wait for what a change before it has left to do."""
    if wanted.strategy.shards and MOMENTUM in run.rank.memory.buffers:
        raise KnobError(
            f"strategy={type(wanted.strategy).__name__}: a compressor still hands the momentum back to the optimizer, "
            f"which is to be shared out; switch one step later"
        )
    return wanted


async def apply(run: Changing, wanted: Experiment) -> None:
    """Makes `run` go on as `wanted` says; the ranks stand at the same step boundary."""
    was = run.experiment
    await drained(run.flow)
    if was.strategy.in_flight:
        await was.strategy.drain(run.rank.replicas, run.state)
    same = type(wanted.strategy) is type(was.strategy)
    anew = was.strategy.opaque and same and _wrapped_by(wanted) != _wrapped_by(was)
    if anew:
        await run.leave_opaque()
    run.experiment = wanted
    run.set_fabric(was, wanted)
    note_idle(run, was)
    run.rate.change(was, wanted, run.rank.step)
    if wanted.optimizer != was.optimizer:
        await was.strategy.recall(run.rank.replicas, run.state)
        shards = handover.cut(run, was.strategy)
        await handover.reshard(run, shards, None)  # one may be made with state that is whole
        _renew(run, wanted)
        await handover.reshard(run, None, shards)
    run.rate.follow(run)
    if wanted.batch != was.batch or wanted.replicas != was.replicas:
        run.restart_data(await used_up(run))
    if wanted.bucket_mb != was.bucket_mb:
        await recut(run, was.strategy, partial(run.rebucket, wanted.bucket_mb))
    if wanted.partition != was.partition and not moves(was, wanted):
        run.tuned()
    if moves(was, wanted) or needs_switch(was.strategy, wanted.strategy, run.rank.size):
        await _switch(run, was, wanted)
    elif wanted.compressor != was.compressor:
        await residual.change(run, was, wanted)
    elif wanted.strategy != was.strategy and arrange(run, wanted):
        run.regrouped()
        await run.gather(0)  # nobody goes on before all have closed what is over
    if anew:
        run.enter_opaque()
    if wanted.partition.recompute != was.partition.recompute:
        note_again(run)
        await run.reading.forget()
    run.reading.by = wanted.strategy
    if not run.flushing:
        await move_momentum(run)
    run.choose_lane()


def _wrapped_by(e: Experiment) -> tuple[Any, ...]:
    """What torch's own goes by when it takes the model."""
    return e.bucket_mb, e.fabric, e.optimizer, e.partition, e.strategy


def take_role(run: Changing, wanted: Experiment) -> None:
    """Whether this rank trains as `wanted` says or only serves, and where in its mesh; said of all by rank 0."""
    rank, strategy = run.rank, wanted.strategy
    arrange(run, wanted)
    rank.role = "trainer" if strategy.trains(rank.id, rank.size) else "server"
    rank.tables = tables_of(run.learner, wanted, run.layout)
    run.layout.gives_back = "gradients" in strategy.shards  # else a first step had room for all of them at once
    serve = [r for r in range(rank.size) if not strategy.trains(r, rank.size)] if rank.id == 0 else []
    if serve:
        text = f"{rank.size - len(serve)} of {rank.size} ranks train; {len(serve)} serve"
        run.mark("roles", {"serve": serve, "text": text})


def arrange(run: Changing, wanted: Experiment) -> bool:
    """Arranges the ranks that train as `wanted` says; groups of before are over if that is anew. Is it?"""
    rank = run.rank
    made = mesh(wanted.strategy, rank.size, rank.mesh.generation + 1, wanted.partition)
    if (made.dims, made.ranks) == (rank.mesh.dims, rank.mesh.ranks):
        return False
    rank.mesh = made
    if rank.id == 0:
        said = {"dims": dict(made.dims), "ranks": made.ranks, "inside": made.inside}
        run.mark("mesh", said | {"text": f"ranks are arranged as {made}"})
    return True


def note_idle(run: Changing, was: Experiment | None = None) -> None:
    """A Mark lists the faults that have no effect now, if they are others than before the change."""
    if run.rank.id:
        return
    found, before = _idle(run.experiment), _idle(was) if was else []
    if found != before:
        run.mark("no effect", {"texts": found})


def note_again(run: Changing) -> None:
    """A Mark says what backward computes again."""
    e, split = run.experiment, run.spread.split if run.spread else None
    if run.rank.id:
        return
    what, shares = e.partition.recompute[0], recomputed(e, run.learner, split)
    units = len(units_of(run.model, run.learner, e.partition))
    text = f"backward computes {units} units of the model again" if units else "activations are kept for backward"
    run.mark("checkpoint", {"what": what, "units": units, "shares": shares, "text": text})


def _idle(e: Experiment) -> list[str]:
    return idle(e.fabric, [r for r in range(e.ranks) if not e.strategy.trains(r, e.ranks)], e.ranks)


def _renew(run: Changing, wanted: Experiment) -> None:
    """Another optimizer takes over, at the present rate. A Mark says what it takes over of what the last remembered."""
    made = run.make_optimizer(wanted)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    moved = carry(run.optimizer, made)
    run.use_optimizer(made)
    if run.rank.id == 0:
        run.mark("optimizer", moved)


def needs_switch(was: Any, wanted: Any, size: int) -> bool:
    """Is `wanted` another way for ranks to agree? A background remembers by its knobs, so a turned one is new; so is
    one that shares state out among others.
    """
    other = bool(wanted.has_background) or (bool(wanted.shards) and sharers(wanted, size) != sharers(was, size))
    return type(wanted) is not type(was) or (wanted != was and other)


async def _switch(run: Changing, was: Experiment, wanted: Experiment) -> None:
    """Leave, consolidate, enter, check. Its bytes cross the Link and it is one span of its own.

    What both strategies share out alike stays where it is, and from shards to stages or slices, and back, all goes
    straight, so that no rank needs room for the whole.
    """
    moved, lies, remembered = moves(was, wanted), lying(run, was.strategy), names(run.state)
    alike = lies.shards is not None and lies.shards == handover.cut(run, wanted.strategy)
    stays = was.strategy.shards if moved else wanted.strategy.shards if alike else ()
    with run.switching(was, wanted):
        await leave(run, was, wanted, lies.shards, stays)
        await residual.change(run, was, wanted, foreign(was, wanted))
        momentum = was.strategy.hands_on(run.rank.replicas, run.state)
        pieces = None
        if moved:
            to = await lying_then(run, wanted)
            await own.carry(run, run.spread, to.spread)
            momentum, pieces = await repartition(run, lies, to, momentum if wanted.strategy.has_outer else None)
        elif not alike:
            await handover.reshard(run, None, handover.cut(run, wanted.strategy))
        run.enter(was, wanted)
        wanted.strategy.takes(run.rank.replicas, run.state, momentum)
        tell(run, was, wanted, remembered, momentum is not None)
        if not run.reading.sharded and pieces is None:
            await handover.check(run)
        if wanted.strategy.opaque:
            run.enter_opaque()
        await run.reading.shard(pieces)


async def leave(run: Changing, was: Experiment, wanted: Experiment, shards: handover.Cut | None,
                stays: Collection[str]) -> None:  # fmt: skip
    """The strategy is left: of all that ranks hold together each has what lies with it, but what `stays` in shards.

    shards: those in which the optimizer's state lies
    """
    if wanted.lr_warmup and not in_step(was):
        await run.rate.agree(run)
    if was.strategy.opaque:
        await run.leave_opaque()
    else:
        await was.strategy.recall(run.rank.replicas, run.state)
        if "parameters" not in stays:
            await run.reading.unshard()
        await run.leave(was.strategy)
        if said := was.strategy.left(run.state):
            run.mark("left", {"strategy": type(was.strategy).__name__, "text": said})
        if "optimizer state" not in stays:
            await handover.reshard(run, shards, None)
        await handover.consolidate(run, was.strategy)
        await handover.spread(run, was.strategy)


async def spread_out(run: Changing) -> None:
    """Before the first step: the model, which each rank has made whole, comes to lie as the partition says."""
    began = run.experiment
    await repartition(run, WHOLE, Lying(spread_of(began, run.model, run.learner)))
    run.enter(began, began)
    await handover.check(run)


def foreign(was: Experiment, wanted: Experiment) -> bool:
    """Does a residual lose its meaning? One of gradients has none among displacements.

    One of moments means nothing to others than those it was left by, which begin anew with every strategy.
    """
    kinds = {was.strategy.exchanges, wanted.strategy.exchanges}
    return len(kinds) > 1 or "moments" in kinds


def in_step(e: Experiment) -> bool:
    """Have all ranks a step in common, whether they meet in it or wait for neighbours or a server only?"""
    return e.strategy.lockstep or e.strategy.propagation(e.ranks) > 0
