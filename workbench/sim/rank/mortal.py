"""The end of one virtual rank, and its way from one generation to the next.

The rules are the engine's (`host/elastic/leaving.py`), without processes and without a store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.host.core.dealing import used_up
from workbench.host.elastic.leaving import hand_down, said, went_back
from workbench.host.elastic.reentry import fewer
from workbench.host.elastic.resizing import come_together
from workbench.host.elastic.voting import Next, Said, named
from workbench.rank import Op
from workbench.settings import Change, Json, KnobError
from workbench.sim.clock.world import Stopped
from workbench.sim.rank.changes import Turnable


@dataclass(frozen=True)
class Join(Change):
    """A planned change by which new ranks join. new: their numbers"""

    path: str = field(default="")
    value: Any = field(default=None)
    new: tuple[int, ...] = ()


class Mortal(Turnable):
    """The part of a Session that ends, and continues in another generation.

    member: this rank's number in the run
    """

    member: int

    def come(self, before: Mortal | None, to: Next) -> None:
        """Enters a generation. before: this rank in the generation before, None for a new rank"""
        self.rank.step, self.obeyed = to.came.step, to.changes
        if before is not None:
            self.rank.lr, self.rate = before.rank.lr, before.rate
            hand_down(before, self.rank, to)
            self.planned, self.bounds, self.outer = before.planned, before.bounds, before.outer
            self.held_out = before.held_out
            self.body.come_again()
        self.restart_data(to.used)

    def leave_generation(self, saved: list[int]) -> Said:
        """Undoes the generation's state, and returns this rank's report. saved: the steps that have checkpoints"""
        if self.common and self.world.real:
            self.body.lie_alone()
        self.common = False
        parts = went_back(self)
        return said(self, self.member, parts, saved if parts else ())

    async def formed(self) -> None:
        """Passes all ranks at one time, so none crashes before every rank holds the full state."""
        await self.gather(0)
        self.body.forget_order()  # a new rank has not seen it, so all ranks learn it again, as real ranks do

    # -- new ranks join --

    async def obey(self, change: Change) -> bool:
        if not isinstance(change, Join):
            return await super().obey(change)
        await self._part(change)
        return False

    async def _part(self, join: Join) -> None:
        """Gathers the state and ends the generation, or records a Mark that says why no rank can join."""
        here = self.world.members
        try:
            wanted = self.able(fewer(self.experiment, tuple(range(len(here))), len(here) + len(join.new)))
        except KnobError as error:
            if self.rank.id == 0:
                said: dict[str, Json] = {"path": "ranks", "value": len(here) + len(join.new)}
                self.mark("refused", said | {"reason": f"{named(join.new)} cannot come: {error}"})
            return
        with self.undoable(True):
            if self.rollback is not None:
                self.rollback.coming = True
            await come_together(self, tuple(range(len(here))))
            used = await used_up(self)
            if self.rollback is not None:
                self.rollback.past()
        del self.taken[0]
        self.obeyed_one()
        self.world.parted = join.new, wanted, used
        await Op("park", lambda fiber: None, "the ranks that come")

    # -- ends --

    async def crash(self, mine: bool) -> None:
        if not mine:
            return
        text = f"rank {self.member} crashed before step {self.rank.step}"
        about: dict[str, Json] = {"rank": self.member, "step": self.rank.step, "op": "between two steps",
                                  "type": "Crash", "text": text}  # fmt: skip
        self.mark("error", about)
        self.ends("failed")
        await Op("park", self.world.crashes, "nothing, for it has crashed")

    def ends(self, state: str) -> None:
        """Records that this rank's part in the run is over."""
        self.mark("end", {"rank": self.member, "state": state})

    def alarmed(self, does: str) -> None:
        """Handles a loss that is not finite or has diverged: raises Stopped if the run must stop, otherwise goes on."""
        if does == "stop":
            raise Stopped

    def stopped(self) -> None:
        """Records that the simulation stopped before its last step."""
        self.say("stopped")
        self.ends("stopped")
