"""Cuts buckets in the order of gradients, as soon as it is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

from workbench.host.core.views import RankView
from workbench.host.loop.views import LoopView
from workbench.host.passes.tensor_schedule import find_arrival_order, find_plans
from workbench.host.reconfigure import changes
from workbench.host.transfer import handover
from workbench.host.transfer.rebucket import recut_buckets
from workbench.settings import KnobError


class BucketOrdering(ABC):
    """A RankLoop's buckets."""

    async def split_state(self: LoopView, ahead: bool = False) -> None:
        """Splits whole state for the partition and the strategy.

        ahead: orders the buckets first
        """
        if self.experiment.partition.size > 1:
            await changes.spread_model(self)
        else:
            self.tune_partition()
        if self.experiment.partition.recompute[0] != "none":
            changes.mark_recomputed(self)
        if ahead:
            await self.foresee_order()
            await self.saving.restore_order()
        await handover.reshard_slots(self, None, handover.find_shards(self, self.experiment.strategy))
        await self.reading.shard_parameters()

    async def foresee_order(self: LoopView) -> None:
        """Cuts buckets in the order of gradients, if a trial can foresee it.

        A trial only for this order must be cheap: the task is pure, and the model is not built again.
        """
        strategy = self.experiment.strategy
        shards = "parameters" in strategy.shards
        if strategy.opaque or not (shards or strategy.exchanges == "gradients"):
            return
        if (trial := await self.reading.foresee_trace(cheaply=not shards)) is None:
            return
        arrival = _find_sliced_order(self) or trial.gradient_order
        present = _list_names(self)
        came, here = set(arrival), set(present)
        names = await self.agree_on_order([n for n in arrival if n in here] + [n for n in present if n not in came])
        if names != present:
            await self.reorder_parameters(names)

    async def reorder_buckets(self: LoopView, names: list[str]) -> None:
        strategy = self.experiment.strategy
        if names == _list_names(self):
            return
        if strategy.in_flight:
            await strategy.drain(self.rank.replicas, self.state)
        await recut_buckets(self, strategy, partial(self.reorder_parameters, names))

    @abstractmethod
    async def agree_on_order(self, names: list[str]) -> list[str]:
        """Returns `names` of the first rank with the same part of the model."""

    @abstractmethod
    async def reorder_parameters(self, names: list[str]) -> None:
        """Also cuts new buckets."""


def _find_sliced_order(run: RankView) -> list[str]:
    """Backward adds sliced gradients up at its end."""
    split = run.spread.split if run.spread else None
    if split is None:
        return []
    try:
        return find_arrival_order(find_plans(run.experiment, run.learner, split))
    except KnobError:
        return []


def _list_names(run: RankView) -> list[str]:
    return [place.name for place in run.layout.order]
