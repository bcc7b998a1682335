"""In which order buckets are cut: in that of gradients, as soon as anybody knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from workbench.experiment import Experiment
from workbench.host.passes.meetings import arrival_of, plans_of
from workbench.host.reconfigure import changes
from workbench.host.sharding.reading import Reading
from workbench.host.transfer import handover
from workbench.host.transfer.recut import recut
from workbench.rank import Rank
from workbench.settings import KnobError


class Ordering(ABC):
    """The part of a Life that cuts its buckets."""

    experiment: Experiment
    rank: Rank
    layout: Any
    state: Any
    reading: Reading

    async def share_out(self: Any, ahead: bool = False) -> None:
        """What every rank has whole comes to lie as the partition and the strategy say. ahead: in which order, too?"""
        if self.experiment.partition.size > 1:
            await changes.spread_out(self)
        else:
            self.tuned()
        if self.experiment.partition.recompute[0] != "none":
            changes.note_again(self)
        if ahead:
            await self.order_ahead()
            await self.saving.order()
        await handover.reshard(self, None, handover.cut(self, self.experiment.strategy))
        await self.reading.shard()

    async def order_ahead(self) -> None:
        """Buckets are cut in the order in which gradients will come, if that is told before they do.

        Where nothing but that order hangs on it, only of tasks that are pure, and without building the model once more.
        """
        strategy = self.experiment.strategy
        shards = "parameters" in strategy.shards
        if strategy.opaque or not (shards or strategy.exchanges == "gradients"):
            return
        if (trial := await self.reading.foresee(cheaply=not shards)) is None:
            return
        arrival = self._in_slices() or trial.arrival
        came, here = set(arrival), set(self._order)
        names = await self.agreed([n for n in arrival if n in here] + [n for n in self._order if n not in came])
        if names != self._order:
            await self.relay_in(names)

    def _in_slices(self: Any) -> list[str]:
        """In which order gradients come where matrices are dealt out: some are added up at the end of a backward."""
        split = self.spread.split if self.spread else None
        if split is None:
            return []
        try:
            return arrival_of(plans_of(self.experiment, self.learner, split))
        except KnobError:
            return []

    @property
    def _order(self) -> list[str]:
        """The parameters as they lie."""
        return [place.name for place in self.layout.order]

    async def reorder(self, names: list[str]) -> None:
        """Buckets are cut in the order in which gradients come, unless they lie so already, as was foreseen."""
        strategy = self.experiment.strategy
        if names == self._order:
            return
        if strategy.in_flight:
            await strategy.drain(self.rank.replicas, self.state)
        await recut(self, strategy, partial(self.relay_in, names))  # type: ignore[arg-type]

    @abstractmethod
    async def agreed(self, names: list[str]) -> list[str]:
        """What the first rank says, of those that hold the same of the model."""

    @abstractmethod
    async def relay_in(self, names: list[str]) -> None:
        """Lays the parameters out in this order, and cuts buckets anew."""
