"""Lets a rank go on when other ranks are lost."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from workbench.host.checkpoint.recovery import RecoveryCheckpoint
from workbench.host.core.answers import RequestAnswer
from workbench.host.core.planned import Planned
from workbench.host.elastic.reassembling import assemble_model
from workbench.host.elastic.reentry import Membership, agree_on_state, broadcast_momentum
from workbench.host.elastic.rollback import Rollback
from workbench.host.loop.views import LoopView
from workbench.host.memory.offload import OffloadStore
from workbench.host.reconfigure.changes import take_role
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.reconfigure.unfreezing import unfreeze_parameters
from workbench.host.transfer import residual
from workbench.host.transfer.boundary import Boundary
from workbench.rank import Rank
from workbench.settings import Json

MAX_UNDONE = 16  # that a rank can undo


class ElasticMember:
    """The part of a RankLoop that handles generations.

    rollback: the way back to the last boundary; None if no rank is ever lost
    taken:    the planned changes to make now
    obeyed:   the number of changes made or refused so far
    bounds:   the boundaries that this rank can go back to, between 2 generations
    outer:    its outer momentum there
    former:   the checkpoint to which all ranks go back, or None
    crashing: the ranks that a fault ends at this boundary or the next
    answer:   the result of the last change, the same on every rank
    made_changes: the last changes, each None if it was not planned
    """

    rank: Rank
    steering: PolicyRunner
    rollback: Rollback | None = None
    planned: list[Planned]
    taken: list[Planned] = []  # noqa: RUF012 (never changed in place)
    obeyed = 0
    bounds: list[Boundary] = []  # noqa: RUF012 (never changed in place)
    outer: dict[str, Tensor] | None = None
    former: RecoveryCheckpoint | None = None
    crashing: Collection[int] = frozenset()
    answer: RequestAnswer | None = None
    made_changes: Sequence[Planned | None] = ()

    async def pass_boundary(self) -> None:
        """A crashing rank ends here."""
        await self._crash_if_due()
        await self.make_due_changes()
        await self._crash_if_due()

    async def _crash_if_due(self) -> None:
        if self.crashing:
            mine, self.crashing = self.rank.id in self.crashing, frozenset()
            if mine:
                self.mark("fault", {"text": "crashed, as a fault says"})
            await self.crash_rank(mine)

    async def train_in_generation(self: LoopView, came: Membership) -> None:
        """Trains to the last step."""
        if came.salvaged is not None:
            await assemble_model(self, came, self.bounds, self.former)
        self.bounds, self.former = [], None
        await self.align_order()
        await agree_on_state(self, came)
        if len(came.members) > len(came.places):
            await self.rate.agree_on_factor(self)
            await self.finite.agree_on_first_loss()
        await self.steering.agree_on_changes()
        _start_strategy(self)
        await self.split_state(ahead=came.salvaged is not None)
        if self.experiment.strategy.has_outer and self.experiment.partition.size == 1:
            await broadcast_momentum(self, self.outer, min(came.furthest))
        self.outer = None
        await self.confirm_formed()
        self.set_phase("running")
        await self.run_steps()

    async def align_order(self: LoopView) -> None:
        """All ranks take rank 0's order, because new ranks know none."""
        here = [place.name for place in self.layout.order]
        names = json.loads(await self.broadcast_text(json.dumps(here) if self.rank.id == 0 else ""))
        unfreeze_parameters(self, names)
        if names != [place.name for place in self.layout.order]:
            await self.reorder_parameters(names)

    def guard_step(self, changes: bool = False) -> AbstractContextManager[None]:
        """Encloses a step or a change. If a rank is lost inside, this one can go back."""
        return nullcontext() if self.rollback is None else self.rollback.guard_step(changes)

    async def make_changes(self, changes: list[Planned]) -> None:
        """Remaining changes stay in `taken`."""
        self.taken = changes
        while self.taken:
            await self.execute_change(self.taken[0])
            self.count_obeyed(self.taken.pop(0))
            await self._crash_if_due()  # the next change may end it

    def count_obeyed(self, planned: Planned | None = None) -> None:
        """planned: None for other changes"""
        self.obeyed += 1
        self.made_changes = (*self.made_changes, planned)[-MAX_UNDONE:]

    def replan_changes(self, changes: int) -> None:
        """Makes `changes` the number of made changes.

        A rank with fewer skips the missing ones. A rank with more plans its planned ones again.
        """
        todo, undone = [*self.taken, *self.planned], self.obeyed - changes
        again = [change for change in list(self.made_changes)[-undone:] if change is not None] if undone > 0 else []
        self.taken, self.planned = [], [*again, *todo[max(0, -undone) :]]
        if undone > 0:
            self.steering.undo_changes(changes)

    @abstractmethod
    async def confirm_formed(self) -> None:
        """Waits until every rank holds the full state. If one does not, no generation forms."""

    @property
    @abstractmethod
    def offloaded_state(self) -> OffloadStore:
        """State off the device."""

    @abstractmethod
    def resize_own_buckets(self, bucket_mb: float) -> None:
        """Only between 2 generations."""

    @abstractmethod
    def release_state(self, seed: int) -> None:
        """Drops this rank's part of the model. Seeds the random numbers."""

    @abstractmethod
    def reallocate_state(self) -> None:
        """Puts the whole model into buckets."""

    @abstractmethod
    async def crash_rank(self, mine: bool) -> None:
        """Crashes a rank, this one if `mine`, once all ranks have made the change that brought the fault."""

    @abstractmethod
    def mark(self, name: str, detail: Mapping[str, Json]) -> None: ...
    @abstractmethod
    async def make_due_changes(self) -> None: ...
    @abstractmethod
    async def execute_change(self, change: Planned) -> bool: ...

    def begin_generation(self: LoopView) -> None:
        """Call it before ranks exchange anything."""
        e = self.experiment
        self.set_fabric(e, e)
        take_role(self, e)
        self.reset_groups()
        residual.start_compressor(self)
        self.choose_lane()


def _start_strategy(run: LoopView) -> None:
    """Call it with equal states."""
    run.rate.set_rate(run)
    run.enter_strategy(None, run.experiment)
    if run.experiment.strategy.opaque:
        run.enter_opaque()
    run.choose_lane()
    run.steering.restart_plan()
    run.saving.plan_next()
    run.ledger.recount_standing()
