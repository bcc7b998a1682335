"""Cuts buckets in the order of gradients, as soon as it is known."""

from __future__ import annotations

from functools import partial

from workbench.host.core.rank_view import RankView
from workbench.host.loop.entering_view import BucketOrderView
from workbench.host.passes.tensor_schedule import find_arrival_order, find_plans
from workbench.host.reconfigure import changes
from workbench.host.transfer import handover
from workbench.host.transfer.rebucket import recut_buckets
from workbench.settings import KnobError


async def split_state(run: BucketOrderView, ahead: bool = False) -> None:
    """Splits whole state as the partition and the strategy need it.

    ahead: orders the buckets first
    """
    if run.experiment.partition.size > 1:
        await changes.spread_model(run)
    else:
        run.tune_partition()
    if run.experiment.partition.recompute[0] != "none":
        changes.mark_recomputed(run)
    if ahead:
        await foresee_order(run)
        await run.checkpointer.restore_order()
    await handover.reshard_slots(run, None, handover.find_shards(run, run.experiment.strategy))
    await run.unsharder.shard_parameters()


async def foresee_order(run: BucketOrderView) -> None:
    """Cuts buckets in the order of gradients, if a trial can foresee it.

    A trial for this order alone must be cheap: the task is pure, and the model is not built again.
    """
    strategy = run.experiment.strategy
    shards = "parameters" in strategy.shards
    if strategy.opaque or not (shards or strategy.exchanges == "gradients"):
        return
    if (trial := await run.unsharder.foresee_trace(cheaply=not shards)) is None:
        return
    arrival = _find_sliced_order(run) or trial.gradient_order
    present = _list_names(run)
    came, here = set(arrival), set(present)
    names = await run.agree_on_order([n for n in arrival if n in here] + [n for n in present if n not in came])
    if names != present:
        await run.reorder_parameters(names)


async def reorder_buckets(run: BucketOrderView, names: list[str]) -> None:
    """Cuts buckets in the order `names`, unless they have it already."""
    strategy = run.experiment.strategy
    if names == _list_names(run):
        return
    if strategy.in_flight:
        await strategy.drain(run.rank.replicas, run.state)
    await recut_buckets(run, strategy, partial(run.reorder_parameters, names))


def _find_sliced_order(run: RankView) -> list[str]:
    """Returns the order of gradients: backward sums sliced ones at its end."""
    split = run.spread.split if run.spread else None
    if split is None:
        return []
    try:
        return find_arrival_order(find_plans(run.experiment, run.learner, split))
    except KnobError:
        return []


def _list_names(run: RankView) -> list[str]:
    return [place.name for place in run.layout.order]
