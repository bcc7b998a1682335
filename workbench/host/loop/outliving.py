"""What a rank's life needs to go on where others are lost: a way back from a step, and a new beginning."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from workbench.host.checkpoint.reread import Former
from workbench.host.core.answers import Answer
from workbench.host.elastic.reentry import Came, hand_on, reenter
from workbench.host.elastic.regathering import put_together
from workbench.host.elastic.rollback import Rollback
from workbench.host.reconfigure.changes import take_role
from workbench.host.reconfigure.unfreezing import unfreeze
from workbench.host.transfer import residual
from workbench.host.transfer.boundary import Boundary
from workbench.settings import Change

UNDONE = 16  # changes that are remembered for a while after they were made


class Outliving:
    """The part of a Life that knows of generations.

    rollback: the way back; None where nobody is ever lost
    taken:    of the planned changes those that are to be made now
    obeyed:   how many changes were made or refused so far
    bounds:   boundaries that this rank can go back to; outer: the outer momentum that it had; former:
              the checkpoint to which all go back. Between two generations
    crashing: the ranks that a fault ends at the boundary that comes, or is here
    answer:   what the last change came to, on every rank what one of them has said in the record
    """

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

    async def come_past(self: Any) -> None:
        """Takes what is due at this boundary; one that a fault crashes comes no further."""
        await self._fall()
        await self.boundary()
        await self._fall()

    async def _fall(self: Any) -> None:
        if self.crashing:
            mine, self.crashing = self.rank.id in self.crashing, frozenset()
            if mine:
                self.mark("fault", {"text": "crashed, as a fault says"})
            await self.crash(mine)

    async def live_on(self: Any, came: Came) -> None:
        """From a step on before which ranks were lost, or came, to the last step."""
        if came.salvaged is not None:
            await put_together(self, came, self.bounds, self.former)
        self.bounds, self.former = [], None
        await self.lie_alike()
        await reenter(self, came)
        if len(came.members) > len(came.places):
            await self.rate.agree(self)
            await self.finite.agree()
        await self.steering.agree()
        self._entered()
        await self.share_out(ahead=came.salvaged is not None)
        if self.experiment.strategy.has_outer and self.experiment.partition.size == 1:
            await hand_on(self, self.outer, min(came.furthest))
        self.outer = None
        await self.formed()
        self.say("running")
        await self.on()

    async def lie_alike(self: Any) -> None:
        """The parameters lie in one order on all; one who comes has not seen in which gradients do."""
        here = [place.name for place in self.layout.order]
        names = json.loads(await self.told(json.dumps(here) if self.rank.id == 0 else ""))
        unfreeze(self, names)
        if names != [place.name for place in self.layout.order]:
            await self.relay_in(names)

    def undoable(self, changes: bool = False) -> AbstractContextManager[None]:
        """A step, or a change, goes on inside; if a rank is lost then, this one can go back."""
        return nullcontext() if self.rollback is None else self.rollback.within(changes)

    async def take(self, changes: list[Change]) -> None:
        """Makes planned changes one after the other; those that are left stay in `taken`."""
        self.taken = changes
        while self.taken:
            await self.obey(self.taken[0])
            self.obeyed_one(self.taken.pop(0))
            await self._fall()  # what is due next may end the generation

    def obeyed_one(self, planned: Change | None = None) -> None:
        """A change was made, or refused. planned: it, if it was not asked for"""
        self.obeyed += 1
        self._made = (*self._made, planned)[-UNDONE:]

    def plan_again(self: Any, changes: int) -> None:
        """So many changes count as made: those that others have made are not to come, of those that do not count all
        that were planned are.
        """
        todo, undone = [*self.taken, *self.planned], self.obeyed - changes
        again = [change for change in list(self._made)[-undone:] if change is not None] if undone > 0 else []
        self.taken, self.planned = [], [*again, *todo[max(0, -undone) :]]
        if undone > 0:
            self.steering.undo(changes)

    @abstractmethod
    async def formed(self) -> None:
        """Every rank of the generation holds the full state by now, or the generation does not form."""

    @property
    @abstractmethod
    def kept_away(self) -> Any:
        """What this rank keeps away from its device."""

    @abstractmethod
    def cut_anew(self, bucket_mb: float) -> None:
        """Between two generations: the parameters lie in buckets of another size."""

    @abstractmethod
    def lie_bare(self, seed: int) -> None:
        """No part of the model is here any more, nor the way in which it lay; random numbers begin anew by `seed`."""

    @abstractmethod
    def lie_anew(self) -> None:
        """All of the model, which has memory again, lies in buckets, and there is an optimizer for it."""

    @abstractmethod
    async def crash(self, mine: bool) -> None:
        """This rank, if it is `mine`, or another ends here without a word, once all know what brought that about."""

    @abstractmethod
    async def obey(self, change: Change) -> bool: ...

    def begin_again(self: Any) -> None:
        """A generation begins: its ranks can reach each other, and nothing has been exchanged yet."""
        e = self.experiment
        self.set_fabric(e, e)
        take_role(self, e)
        self.regrouped()
        residual.begin(self)
        self.choose_lane()

    def _entered(self: Any) -> None:
        """The strategy takes over, from a state that all have."""
        self.rate.follow(self)
        self.enter(None, self.experiment)
        if self.experiment.strategy.opaque:
            self.enter_opaque()
        self.choose_lane()
        self.steering.begin_again()
        self.saving.plan()
        self.ledger.stir()
