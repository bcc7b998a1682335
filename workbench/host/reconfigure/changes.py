"""Applies a change between two steps on every rank, and hands over between strategies.

A hand-over is a coroutine of a step's verbs, so either host drives it, too. Leaving a strategy brings every rank to the
canonical state: one value of parameters and optimizer state. Entering starts there. So S strategies need 2 S adapters,
not S squared. Afterwards a hash of the parameters must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from workbench.experiment import Experiment
from workbench.experiment.arranged import mesh, sharers
from workbench.fabric import Fabric
from workbench.fabric.load import idle
from workbench.host.core.answers import Answer
from workbench.host.core.dealing import used_up
from workbench.host.core.remembered import names, tell
from workbench.host.passes.checkpointing import units_of
from workbench.host.passes.pipelining import drained
from workbench.host.passes.recomputing import recomputed
from workbench.host.placement.spread import spread_of
from workbench.host.reconfigure.refusing import moves
from workbench.host.reconfigure.views import PolicyView
from workbench.host.transfer import handover, own, residual
from workbench.host.transfer.lying import WHOLE, Lying, lying, lying_then
from workbench.host.transfer.momentum import move_momentum
from workbench.host.transfer.recut import recut
from workbench.host.transfer.repartition import repartition
from workbench.host.transfer.shards import Cut
from workbench.host.transfer.tables import tables_of
from workbench.host.transfer.views import Changing
from workbench.optimizers import Optimizer, carry
from workbench.partitions import Partition
from workbench.rank import MOMENTUM
from workbench.settings import Change, Json, KnobError, resolved
from workbench.tasks import at_rate, rate

if TYPE_CHECKING:
    from workbench.strategies import Strategy


async def obey(run: Changing, change: Change) -> bool:
    """Makes or refuses one change on all ranks between the same two steps.

    Returns whether it was made. A Mark "change" or "refused" records the result.
    """
    wanted, reason = None, ""
    try:
        wanted = _ready(run, run.able(run.experiment.set(change.path, change.value)))
    except KnobError as error:
        reason = str(error)
    refusing = await run.gather(int(wanted is None))  # one rank's refusal is enough
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


async def refused(run: PolicyView, together: Sequence[Change]) -> Change | None:
    """Returns the first joint change that some rank cannot make, and records it; else None."""
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


def _refusal(change: Change, reason: str) -> dict[str, Json]:
    return {**change.plain(), **({"why": change.reason} if change.by else {}), "reason": reason}


def _answer(run: Changing, by: int, name: str, detail: dict[str, Json]) -> None:
    """Records a change's result by rank `by`. All ranks keep it, because that rank may be lost."""
    run.answer = Answer(name, run.rank.step, run.now, detail)
    if run.rank.id == by:
        run.mark(name, detail)


def _ready(run: Changing, wanted: Experiment) -> Experiment:
    """Returns `wanted`. Raises KnobError if it must wait until an earlier change has completed."""
    if wanted.strategy.shards and MOMENTUM in run.rank.memory.buffers:
        raise KnobError(
            f"strategy={type(wanted.strategy).__name__}: a compressor still hands the momentum back to the optimizer, "
            f"which is to be shared out; switch one step later"
        )
    return wanted


async def apply(run: Changing, wanted: Experiment) -> None:
    """Changes `run` to `wanted`. All ranks are at the same step boundary."""
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
        await handover.reshard(run, shards, None)  # a new optimizer may begin with whole state
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
        await run.gather(0)  # all ranks must have closed the old groups
    if anew:
        run.enter_opaque()
    if wanted.partition.recompute != was.partition.recompute:
        note_again(run)
        await run.reading.forget()
    run.reading.by = wanted.strategy
    if not run.flushing:
        await move_momentum(run)
    run.choose_lane()


def _wrapped_by(e: Experiment) -> tuple[float, Fabric, Optimizer, Partition, Strategy]:
    """Returns the settings that an opaque strategy reads when torch wraps the model."""
    return e.bucket_mb, e.fabric, e.optimizer, e.partition, e.strategy


def take_role(run: Changing, wanted: Experiment) -> None:
    """Sets this rank's role, trainer or server, and its mesh. Rank 0 records the servers."""
    rank, strategy = run.rank, wanted.strategy
    arrange(run, wanted)
    rank.role = "trainer" if strategy.trains(rank.id, rank.size) else "server"
    rank.tables = tables_of(run.learner, wanted, run.layout)
    run.layout.gives_back = "gradients" in strategy.shards  # else the first step allocates all of them
    serve = [r for r in range(rank.size) if not strategy.trains(r, rank.size)] if rank.id == 0 else []
    if serve:
        text = f"{rank.size - len(serve)} of {rank.size} ranks train; {len(serve)} serve"
        run.mark("roles", {"serve": serve, "text": text})


def arrange(run: Changing, wanted: Experiment) -> bool:
    """Arranges the training ranks as `wanted` says. Returns whether the mesh is new."""
    rank = run.rank
    made = mesh(wanted.strategy, rank.size, rank.mesh.generation + 1, wanted.partition)
    if (made.dims, made.ranks) == (rank.mesh.dims, rank.mesh.ranks):
        return False
    rank.mesh = made
    if rank.id == 0:
        said: dict[str, Json] = {"dims": dict(made.dims), "ranks": made.ranks, "inside": made.inside}
        run.mark("mesh", said | {"text": f"ranks are arranged as {made}"})
    return True


def note_idle(run: Changing, was: Experiment | None = None) -> None:
    """Records which faults have no effect now, if the change altered that."""
    if run.rank.id:
        return
    found, before = _idle(run.experiment), _idle(was) if was else []
    if found != before:
        run.mark("no effect", {"texts": found})


def note_again(run: Changing) -> None:
    """Records which units backward computes again."""
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
    """Replaces the optimizer at the current rate. A Mark records which state the new one gets."""
    made = run.make_optimizer(wanted)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    moved = carry(run.optimizer, made)
    run.use_optimizer(made)
    if run.rank.id == 0:
        run.mark("optimizer", moved)


def needs_switch(was: Strategy, wanted: Strategy, size: int) -> bool:
    """Whether going from strategy `was` to `wanted` needs a hand-over.

    It does if the types differ, or the ranks that share state. It also does if a knob of a strategy with a background
    task differs, because its state depends on its knobs.
    """
    other = bool(wanted.has_background) or (bool(wanted.shards) and sharers(wanted, size) != sharers(was, size))
    return type(wanted) is not type(was) or (wanted != was and other)


async def _switch(run: Changing, was: Experiment, wanted: Experiment) -> None:
    """Switches the strategy or the partition: leave, consolidate, enter, check.

    The switch is one span, and its bytes cross the Link. State that both strategies shard alike stays in place. Between
    shards and stages or slices state moves directly, so no rank needs memory for the whole model.
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


async def leave(run: Changing, was: Experiment, wanted: Experiment, shards: Cut | None,
                stays: Collection[str]) -> None:  # fmt: skip
    """Leaves the strategy: each rank gets its part of the canonical state as whole tensors.

    shards: the cut of the optimizer state now
    stays:  the kinds of state that remain in shards
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
    """Lays out the model by the partition before the first step. Each rank has built it whole."""
    began = run.experiment
    await repartition(run, WHOLE, Lying(spread_of(began, run.model, run.learner)))
    run.enter(began, began)
    await handover.check(run)


def foreign(was: Experiment, wanted: Experiment) -> bool:
    """Whether residuals lose their meaning in the switch.

    A residual of gradients has no meaning for displacements. A residual of moments belongs to one strategy's moments.
    """
    kinds = {was.strategy.exchanges, wanted.strategy.exchanges}
    return len(kinds) > 1 or "moments" in kinds


def in_step(e: Experiment) -> bool:
    """Whether all ranks keep a common step, even if they wait only for neighbours or a server."""
    return e.strategy.lockstep or e.strategy.propagation(e.ranks) > 0
