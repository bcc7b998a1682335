"""Lets a rank go on when other ranks are lost: it goes back from a step, and enters a new generation."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from workbench.host.checkpoint.reread import Former
from workbench.host.core.answers import Answer
from workbench.host.elastic.reentry import Came, hand_on, reenter
from workbench.host.elastic.regathering import put_together
from workbench.host.elastic.rollback import Rollback
from workbench.host.loop.views import LoopView
from workbench.host.memory.offload import Offloaded
from workbench.host.reconfigure.changes import take_role
from workbench.host.reconfigure.steering import Steering
from workbench.host.reconfigure.unfreezing import unfreeze
from workbench.host.transfer import residual
from workbench.host.transfer.boundary import Boundary
from workbench.rank import Rank
from workbench.settings import Change, Json

UNDONE = 16  # made changes that a rank can still undo


class Outliving:
    """The part of a Life that handles generations.

    rollback: the way back to the last boundary; None if no rank is ever lost
    taken:    the planned changes to make now
    obeyed:   the number of changes made or refused so far
    bounds:   the boundaries that this rank can go back to, between 2 generations
    outer:    its outer momentum there
    former:   the checkpoint to which all ranks go back, or None
    crashing: the ranks that a fault ends at this boundary or the next
    answer:   the result of the last change, the same on every rank
    """

    rank: Rank
    steering: Steering
    rollback: Rollback | None = None
    planned: list[Change]
    taken: list[Change] = []  # noqa: RUF012 (never changed in place)
    obeyed = 0
    bounds: list[Boundary] = []  # noqa: RUF012 (never changed in place)
    outer: dict[str, Tensor] | None = None
    former: Former | None = None
    crashing: Collection[int] = frozenset()
    answer: Answer | None = None
    _made: Sequence[Change | None] = ()

    async def come_past(self) -> None:
        """Takes what is due at this boundary. A rank that a fault crashes ends here."""
        await self._fall()
        await self.boundary()
        await self._fall()

    async def _fall(self) -> None:
        if self.crashing:
            mine, self.crashing = self.rank.id in self.crashing, frozenset()
            if mine:
                self.mark("fault", {"text": "crashed, as a fault says"})
            await self.crash(mine)

    async def live_on(self: LoopView, came: Came) -> None:
        """Trains in a new generation, after ranks were lost or came, to the last step."""
        if came.salvaged is not None:
            await put_together(self, came, self.bounds, self.former)
        self.bounds, self.former = [], None
        await self.lie_alike()
        await reenter(self, came)
        if len(came.members) > len(came.places):
            await self.rate.agree(self)
            await self.finite.agree()
        await self.steering.agree()
        _enter(self)
        await self.share_out(ahead=came.salvaged is not None)
        if self.experiment.strategy.has_outer and self.experiment.partition.size == 1:
            await hand_on(self, self.outer, min(came.furthest))
        self.outer = None
        await self.formed()
        self.say("running")
        await self.on()

    async def lie_alike(self: LoopView) -> None:
        """Gives all ranks rank 0's order of parameters, because a new rank does not know the order of gradients."""
        here = [place.name for place in self.layout.order]
        names = json.loads(await self.told(json.dumps(here) if self.rank.id == 0 else ""))
        unfreeze(self, names)
        if names != [place.name for place in self.layout.order]:
            await self.relay_in(names)

    def undoable(self, changes: bool = False) -> AbstractContextManager[None]:
        """A context for a step or a change. If a rank is lost inside, this one can go back."""
        return nullcontext() if self.rollback is None else self.rollback.within(changes)

    async def take(self, changes: list[Change]) -> None:
        """Makes planned changes one after another. The remaining ones stay in `taken`."""
        self.taken = changes
        while self.taken:
            await self.obey(self.taken[0])
            self.obeyed_one(self.taken.pop(0))
            await self._fall()  # the next change may end the generation

    def obeyed_one(self, planned: Change | None = None) -> None:
        """Counts a change that was made or refused. planned: the change, if it was a planned one"""
        self.obeyed += 1
        self._made = (*self._made, planned)[-UNDONE:]

    def plan_again(self, changes: int) -> None:
        """Makes `changes` the number of made changes.

        If other ranks have made more than this one, it skips them. If this one has made more, it plans the planned ones
        among the rest again.
        """
        todo, undone = [*self.taken, *self.planned], self.obeyed - changes
        again = [change for change in list(self._made)[-undone:] if change is not None] if undone > 0 else []
        self.taken, self.planned = [], [*again, *todo[max(0, -undone) :]]
        if undone > 0:
            self.steering.undo(changes)

    @abstractmethod
    async def formed(self) -> None:
        """Waits until every rank of the generation holds the full state. If one does not, no generation forms."""

    @property
    @abstractmethod
    def kept_away(self) -> Offloaded:
        """The state that this rank has offloaded from its device."""

    @abstractmethod
    def cut_anew(self, bucket_mb: float) -> None:
        """Cuts buckets of another size, between 2 generations."""

    @abstractmethod
    def lie_bare(self, seed: int) -> None:
        """Drops this rank's part of the model and its placement. Seeds the random numbers with `seed`."""

    @abstractmethod
    def lie_anew(self) -> None:
        """Puts the whole model, which has memory again, into buckets, and makes its optimizer."""

    @abstractmethod
    async def crash(self, mine: bool) -> None:
        """Crashes this rank if `mine`, or another one, once all ranks have made the change that brought the fault."""

    @abstractmethod
    def mark(self, name: str, detail: Mapping[str, Json]) -> None: ...
    @abstractmethod
    async def boundary(self) -> None: ...
    @abstractmethod
    async def obey(self, change: Change) -> bool: ...

    def begin_again(self: LoopView) -> None:
        """Begins a generation, when its ranks can reach each other and have exchanged nothing yet."""
        e = self.experiment
        self.set_fabric(e, e)
        take_role(self, e)
        self.regrouped()
        residual.begin(self)
        self.choose_lane()


def _enter(run: LoopView) -> None:
    """Starts the strategy, from a state that all ranks have."""
    run.rate.follow(run)
    run.enter(None, run.experiment)
    if run.experiment.strategy.opaque:
        run.enter_opaque()
    run.choose_lane()
    run.steering.begin_again()
    run.saving.plan()
    run.ledger.stir()
