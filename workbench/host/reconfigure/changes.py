"""Applies a change between two steps on every rank and hands over between strategies.

Leaving a strategy brings every rank to the canonical state, where the next one begins. So S strategies need 2 S
adapters, not S squared. Afterwards all ranks compare a hash of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from workbench.experiment import Experiment
from workbench.experiment.mesh_rules import list_shard_groups, make_mesh
from workbench.fabric import Fabric
from workbench.fabric.load import idle
from workbench.host.core.data_positions import count_used_up
from workbench.host.core.dropped_state import list_state_names, report_dropped_state
from workbench.host.core.request_answers import RequestAnswer
from workbench.host.passes.checkpointing import list_units
from workbench.host.passes.pipelining import drain_pipeline
from workbench.host.passes.recomputing import find_recomputed
from workbench.host.placement.replica_spread import find_spread
from workbench.host.reconfigure.policy_view import PolicyView
from workbench.host.reconfigure.validation import has_other_layout, list_tables
from workbench.host.transfer import handover, rank_state, residual
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.momentum import move_momentum
from workbench.host.transfer.rebucket import recut_buckets
from workbench.host.transfer.repartition import repartition_state
from workbench.host.transfer.shard_layout import ShardLayout
from workbench.host.transfer.state_layout import WHOLE, StateLayout, find_layout, plan_layout
from workbench.optimizers import Optimizer, carry
from workbench.partitions import Partition
from workbench.rank import MOMENTUM
from workbench.settings import Change, Json, KnobError, resolved
from workbench.tasks import at_rate, rate

if TYPE_CHECKING:
    from workbench.strategies import Strategy


async def execute_change(run: ChangeView, change: Change) -> bool:
    """Makes or refuses one change on all ranks between the same two steps.

    Returns whether it was made. A Mark "change" or "refused" records it.
    """
    wanted, reason = None, ""
    try:
        wanted = _require_ready(run, run.require_trainable(run.experiment.set(change.path, change.value)))
    except KnobError as error:
        reason = str(error)
    refusing = await run.gather(int(wanted is None))  # one refusal is enough
    if wanted is None or any(refusing):
        first = refusing.index(1)
        reason = reason or f"rank {run.rank.number(first)} cannot make it, for a reason that it did not report"
        _record_answer(run, first, "refused", _describe_refusal(change, reason))
        return False
    began, sent = run.now, run.sent_bytes
    await apply_experiment(run, wanted)
    nbytes, seconds = sum(await run.gather(run.sent_bytes - sent)), run.now - began
    _record_answer(run, 0, "change", {**change.plain(), "text": change.text, "nbytes": nbytes, "seconds": seconds})
    return True


async def find_refused_change(run: PolicyView, together: Sequence[Change]) -> Change | None:
    """Returns and records the first joint change that some rank cannot make."""
    wanted, mine, reason = run.experiment, 0, ""
    for number, change in enumerate(together, 1):
        try:
            wanted = run.require_trainable(resolved(wanted, change)[1])
        except KnobError as error:
            mine, reason = number, str(error)
            break
    refusing = await run.gather(mine)
    if not any(refusing):
        return None
    first = next(rank for rank, number in enumerate(refusing) if number)
    change = together[refusing[first] - 1]
    if run.rank.id == first:
        run.mark("refused", _describe_refusal(change, reason))
    return change


def _describe_refusal(change: Change, reason: str) -> dict[str, Json]:
    return {**change.plain(), **({"why": change.reason} if change.by else {}), "reason": reason}


def _record_answer(run: ChangeView, by: int, name: str, detail: dict[str, Json]) -> None:
    """All ranks keep the answer, because rank `by` may be lost."""
    run.answer = RequestAnswer(name, run.rank.step, run.now, detail)
    if run.rank.id == by:
        run.mark(name, detail)


def _require_ready(run: ChangeView, wanted: Experiment) -> Experiment:
    """Returns `wanted`. Raises KnobError if an earlier change must complete first."""
    if wanted.strategy.shards and MOMENTUM in run.rank.memory.buffers:
        raise KnobError(
            f"strategy={type(wanted.strategy).__name__}: a compressor still returns the momentum to the optimizer, "
            f"whose state would be sharded; switch one step later"
        )
    return wanted


async def apply_experiment(run: ChangeView, wanted: Experiment) -> None:
    """All ranks call it at the same step boundary."""
    was = run.experiment
    await drain_pipeline(run.micros_in_flight)
    if was.strategy.in_flight:
        await was.strategy.drain(run.rank.replicas, run.state)
    same = type(wanted.strategy) is type(was.strategy)
    anew = was.strategy.opaque and same and _list_wrapper_settings(wanted) != _list_wrapper_settings(was)
    if anew:
        await run.leave_opaque()
    run.adopt_settings(wanted, run.rank.step)
    run.set_fabric(was, wanted)
    mark_idle_faults(run, was)
    if wanted.optimizer != was.optimizer:
        await was.strategy.recall(run.rank.replicas, run.state)
        shards = handover.find_shards(run, was.strategy)
        await handover.reshard_slots(run, shards, None)  # it may begin with whole state
        _renew_optimizer(run, wanted)
        await handover.reshard_slots(run, None, shards)
    run.rate.set_rate(run)
    if wanted.batch != was.batch or wanted.replicas != was.replicas:
        run.restart_data(await count_used_up(run))
    if wanted.bucket_mb != was.bucket_mb:
        await recut_buckets(run, was.strategy, partial(run.resize_buckets, wanted.bucket_mb))
    if wanted.partition != was.partition and not has_other_layout(was, wanted):
        run.tune_partition()
    if has_other_layout(was, wanted) or needs_switch(was.strategy, wanted.strategy, run.rank.size):
        await _switch_strategy(run, was, wanted)
    elif wanted.compressor != was.compressor:
        await residual.change_compressor(run, was, wanted)
    elif wanted.strategy != was.strategy and arrange_mesh(run, wanted):
        run.reset_groups()
        await run.gather(0)  # all ranks have closed old groups
    if anew:
        run.enter_opaque()
    if wanted.partition.recompute != was.partition.recompute:
        mark_recomputed(run)
        await run.unsharder.forget_trace()
    run.unsharder.by = wanted.strategy
    if not run.flushing:
        await move_momentum(run)
    run.choose_lane()


def _list_wrapper_settings(e: Experiment) -> tuple[float, Fabric, Optimizer, Partition, Strategy]:
    """Lists settings that an opaque strategy's wrapper reads."""
    return e.bucket_mb, e.fabric, e.optimizer, e.partition, e.strategy


def take_role(run: ChangeView, wanted: Experiment) -> None:
    """Sets this rank's role and mesh. Rank 0 records the servers."""
    rank, strategy = run.rank, wanted.strategy
    arrange_mesh(run, wanted)
    rank.role = "trainer" if strategy.trains(rank.id, rank.size) else "server"
    rank.tables = list_tables(run, wanted)
    run.layout.gives_back = "gradients" in strategy.shards  # else the first step allocates
    serve = [r for r in range(rank.size) if not strategy.trains(r, rank.size)] if rank.id == 0 else []
    if serve:
        text = f"{rank.size - len(serve)} of {rank.size} ranks train; {len(serve)} serve"
        run.mark("roles", {"serve": serve, "text": text})


def arrange_mesh(run: ChangeView, wanted: Experiment) -> bool:
    """Returns whether the mesh is new."""
    rank = run.rank
    made = make_mesh(wanted.strategy, rank.size, rank.mesh.generation + 1, wanted.partition)
    if (made.dims, made.ranks) == (rank.mesh.dims, rank.mesh.ranks):
        return False
    rank.mesh = made
    if rank.id == 0:
        said: dict[str, Json] = {"dims": dict(made.dims), "ranks": made.ranks, "inside": made.inside}
        run.mark("mesh", said | {"text": f"ranks are arranged as {made}"})
    return True


def mark_idle_faults(run: ChangeView, was: Experiment | None = None) -> None:
    """Records faults without effect if they have changed."""
    if run.rank.id:
        return
    found, before = _list_idle_faults(run.experiment), _list_idle_faults(was) if was else []
    if found != before:
        run.mark("no effect", {"texts": found})


def mark_recomputed(run: ChangeView) -> None:
    """Records recomputed units."""
    e, split = run.experiment, run.spread.split if run.spread else None
    if run.rank.id:
        return
    what, shares = e.partition.recompute[0], find_recomputed(e, run.learner, split)
    units = len(list_units(run.model, run.learner, e.partition))
    text = f"backward computes {units} units of the model again" if units else "activations are kept for backward"
    run.mark("checkpoint", {"what": what, "units": units, "shares": shares, "text": text})


def _list_idle_faults(e: Experiment) -> list[str]:
    return idle(e.fabric, [r for r in range(e.ranks) if not e.strategy.trains(r, e.ranks)], e.ranks)


def _renew_optimizer(run: ChangeView, wanted: Experiment) -> None:
    """A Mark records which state the new optimizer gets."""
    made = run.make_optimizer(wanted)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    moved = carry(run.optimizer, made)
    run.use_optimizer(made)
    if run.rank.id == 0:
        run.mark("optimizer", moved)


def needs_switch(was: Strategy, wanted: Strategy, size: int) -> bool:
    """Whether going from strategy `was` to `wanted` needs a hand-over.

    It does if types differ, or the ranks that share state. The state of a strategy with a background task also depends
    on its knobs.
    """
    other = bool(wanted.has_background) or (
        bool(wanted.shards) and list_shard_groups(wanted, size) != list_shard_groups(was, size)
    )
    return type(wanted) is not type(was) or (wanted != was and other)


async def _switch_strategy(run: ChangeView, was: Experiment, wanted: Experiment) -> None:
    """Switches the strategy or the partition: leave, consolidate, enter, check.

    The switch is one span, and its bytes cross the Link. State that both strategies shard alike stays in place. Between
    shards and stages or slices state moves directly, so no rank needs memory for the whole model.
    """
    moved, lies, remembered = has_other_layout(was, wanted), find_layout(run, was.strategy), list_state_names(run.state)
    alike = lies.shards is not None and lies.shards == handover.find_shards(run, wanted.strategy)
    stays = was.strategy.shards if moved else wanted.strategy.shards if alike else ()
    with run.record_switch(was, wanted):
        await make_state_canonical(run, was, wanted, lies.shards, stays)
        await residual.change_compressor(run, was, wanted, has_foreign_residuals(was, wanted))
        momentum = was.strategy.hands_on(run.rank.replicas, run.state)
        pieces = None
        if moved:
            to = await plan_layout(run, wanted)
            await rank_state.migrate_rank_state(run, run.spread, to.spread)
            momentum, pieces = await repartition_state(run, lies, to, momentum if wanted.strategy.has_outer else None)
        elif not alike:
            await handover.reshard_slots(run, None, handover.find_shards(run, wanted.strategy))
        run.enter_strategy(was, wanted)
        wanted.strategy.takes(run.rank.replicas, run.state, momentum)
        report_dropped_state(run, was, wanted, remembered, momentum is not None)
        if not run.unsharder.sharded and pieces is None:
            await handover.require_agreement(run)
        if wanted.strategy.opaque:
            run.enter_opaque()
        await run.unsharder.shard_parameters(pieces)


async def make_state_canonical(run: ChangeView, was: Experiment, wanted: Experiment, shards: ShardLayout | None,
                stays: Collection[str]) -> None:  # fmt: skip
    """Gives each rank its part of the canonical state as whole tensors.

    shards: the cut of the optimizer state now
    stays:  the kinds of state that remain in shards
    """
    if wanted.lr_warmup and not has_common_step(was):
        await run.rate.agree_on_factor(run)
    if was.strategy.opaque:
        await run.leave_opaque()
    else:
        await was.strategy.recall(run.rank.replicas, run.state)
        if "parameters" not in stays:
            await run.unsharder.unshard_all()
        await run.leave(was.strategy)
        if said := was.strategy.left(run.state):
            run.mark("left", {"strategy": type(was.strategy).__name__, "text": said})
        if "optimizer state" not in stays:
            await handover.reshard_slots(run, shards, None)
        await handover.consolidate_state(run, was.strategy)
        await handover.spread_state(run, was.strategy)


async def spread_model(run: ChangeView) -> None:
    """Lays out the model, which each rank has built whole."""
    began = run.experiment
    await repartition_state(run, WHOLE, StateLayout(find_spread(began, run.model, run.learner)))
    run.enter_strategy(began, began)
    await handover.require_agreement(run)


def has_foreign_residuals(was: Experiment, wanted: Experiment) -> bool:
    """Whether residuals lose their meaning in the switch.

    Residuals of gradients mean nothing for displacements. Moments belong to one strategy.
    """
    kinds = {was.strategy.exchanges, wanted.strategy.exchanges}
    return len(kinds) > 1 or "moments" in kinds


def has_common_step(e: Experiment) -> bool:
    """Whether all ranks keep a common step, even if they wait only for neighbours or a server."""
    return e.strategy.lockstep or e.strategy.propagation(e.ranks) > 0
