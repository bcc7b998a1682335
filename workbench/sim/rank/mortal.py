"""The end of one virtual rank, and its way from one generation to the next.

The rules are the engine's (`host/elastic/leaving.py`), without processes and without a store.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.host.core.data_positions import count_used_up
from workbench.host.core.planned import Planned, PlannedEvent
from workbench.host.elastic.leaving import hand_down_state, make_rank_report, return_to_boundary
from workbench.host.elastic.reentry import resize_experiment
from workbench.host.elastic.resizing import gather_state
from workbench.host.elastic.voting import NextGeneration, RankReport, name_ranks
from workbench.rank import Op
from workbench.settings import Json, KnobError
from workbench.sim.clock.world import SimulationStopped
from workbench.sim.rank.changes import Reconfigurable


@dataclass(frozen=True)
class JoinEvent(PlannedEvent):
    """New ranks join. new: their numbers"""

    new: tuple[int, ...] = ()


class MortalRank(Reconfigurable):
    """The part of a Session that ends, and continues in another generation.

    member: this rank's number in the run
    """

    member: int

    def enter_generation(self, before: MortalRank | None, to: NextGeneration) -> None:
        """Enters a generation. before: this rank in the generation before, None for a new rank"""
        self.rank.step, self.obeyed = to.came.step, to.changes
        if before is not None:
            self.rank.lr, self.rate = before.rank.lr, before.rate
            hand_down_state(before, self.rank, to)
            self.planned, self.bounds, self.outer = before.planned, before.bounds, before.outer
            self.held_out = before.held_out
            self.body.discard_step()
        self.restart_data(to.used)

    def leave_generation(self, saved: list[int]) -> RankReport:
        """Undoes the generation's state, and returns this rank's report. saved: the steps that have checkpoints"""
        if self.common and self.world.real:
            self.body.unshare_memory()
        self.common = False
        parts = return_to_boundary(self)
        return make_rank_report(self, self.member, parts, saved if parts else ())

    async def confirm_formed(self) -> None:
        """Passes all ranks at one time, so none crashes before every rank holds the full state."""
        await self.gather(0)
        self.body.forget_order()  # a new rank has not seen it, so all ranks learn it again, as real ranks do

    # -- new ranks join --

    async def execute_change(self, change: Planned) -> bool:
        if not isinstance(change, JoinEvent):
            return await super().execute_change(change)
        await self._end_generation(change)
        return False

    async def _end_generation(self, join: JoinEvent) -> None:
        """Gathers the state and ends the generation, or records a Mark that says why no rank can join."""
        here = self.world.members
        try:
            wanted = self.require_trainable(
                resize_experiment(self.experiment, tuple(range(len(here))), len(here) + len(join.new))
            )
        except KnobError as error:
            if self.rank.id == 0:
                said: dict[str, Json] = {"path": "ranks", "value": len(here) + len(join.new)}
                self.mark("refused", said | {"reason": f"{name_ranks(join.new)} cannot come: {error}"})
            return
        with self.guard_step(True):
            if self.rollback is not None:
                self.rollback.is_gathering = True
            await gather_state(self, tuple(range(len(here))))
            used = await count_used_up(self)
            if self.rollback is not None:
                self.rollback.end_guard()
        del self.taken[0]
        self.count_obeyed()
        self.world.parted = join.new, wanted, used
        await Op("park", lambda fiber: None, "the ranks that come")

    # -- ends --

    async def crash_rank(self, mine: bool) -> None:
        if not mine:
            return
        text = f"rank {self.member} crashed before step {self.rank.step}"
        about: dict[str, Json] = {"rank": self.member, "step": self.rank.step, "op": "between two steps",
                                  "type": "Crash", "text": text}  # fmt: skip
        self.mark("error", about)
        self.mark_end("failed")
        await Op("park", self.world.note_crash, "nothing, for it has crashed")

    def mark_end(self, state: str) -> None:
        """Records that this rank's part in the run is over."""
        self.mark("end", {"rank": self.member, "state": state})

    def handle_alarm(self, does: str) -> None:
        """Handles a loss that is not finite or has diverged: raises SimulationStopped if the run must stop."""
        if does == "stop":
            raise SimulationStopped

    def mark_stopped(self) -> None:
        """Records that the simulation stopped before its last step."""
        self.set_phase("stopped")
        self.mark_end("stopped")
