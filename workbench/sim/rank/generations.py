"""Runs generations of virtual ranks: each ends when ranks are lost or join.

Survivors decide as real ranks do (`host/elastic/shrink_plan.py`). The time until they train again uses constants,
measured on real ranks on two busy cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.experiment import Experiment
from workbench.fabric.load import crashed
from workbench.host.checkpoint.whole_state import open_images
from workbench.host.core.data_positions import NO_INDEX_TEXT, describe_repeats
from workbench.host.core.planned_event import Planned
from workbench.host.elastic.leaving import explain_refusal
from workbench.host.elastic.reentry import Membership
from workbench.host.elastic.shrink_plan import RemainingRank, mark_end_reason, plan_shrink
from workbench.host.elastic.voting import NextGeneration, Quorum
from workbench.record import checkpoints
from workbench.settings import Change, KnobError
from workbench.settings.rank_text import conjugate_be, format_ranks
from workbench.sim.clock.world import TimedCall, VirtualWorld
from workbench.sim.rank.checkpoints import CheckpointStore
from workbench.sim.rank.joining import JoinEvent
from workbench.sim.rank.session import Session

VOTE_SECONDS = 0.27  # from noticing a crash until ranks train again: the median of the kills behind `NOTICED`
REPLACEMENT_SECONDS = 2.0  # until replacements join on new engines: the median in docs/data/replaced.json

Body = Callable[[Experiment, int], Any]


def can_crash(e: Experiment, changes: Sequence[Planned]) -> bool:
    """Whether the settings let a rank crash."""
    if e.policy.decides or crashed((), e.fabric.faults, e.ranks):
        return True
    for change in (c for c in changes if isinstance(c, Change)):
        was = e
        try:
            e = e.set(change.path, change.value)
        except KnobError:
            continue
        if crashed(was.fabric.faults, e.fabric.faults, e.ranks):
            return True
    return False


class Generations:
    """made: makes a new rank's model and data; folder: for checkpoints"""

    def __init__(self, world: VirtualWorld, made: Body, folder: Any = None) -> None:
        self.world, self._made, self._folder = world, made, folder
        self.records = [world.record]
        self._next = world.size  # the next new rank's
        self._coming: list[float] = []  # when replacements are ready

    def run_generations(self, sessions: list[Session]) -> list[Session]:
        """Returns the last generation's sessions."""
        came = None
        while True:
            self._schedule_joins()
            try:
                self.world.run_ranks(sessions, came)
            finally:
                self.world.close()
            to = self._plan_growth() if self.world.parted is not None else self._plan_survival()
            if to is None:
                return sessions
            sessions, came = self._begin_generation(to), to.membership

    # -- lost ranks --

    def _plan_survival(self) -> NextGeneration | None:
        """Returns how survivors continue; None if the run is over."""
        world, left = self.world, self.world.living_sessions
        if world.stopped or not world.fallen:
            return None
        if not left or left[0].experiment.on_death == "end":
            self._fail_run()
            return None
        saved = self._list_saved()
        if reason := next(filter(None, (explain_refusal(session, saved) for session in left)), ""):
            mark_end_reason(left[0].mark, reason)
            self._fail_run()
            return None
        quorum = Quorum({session.rank.id: session.leave_generation(saved) for session in left})
        first = next(session for session in left if session.member == quorum.furthest_report.member)
        try:
            to = plan_shrink(self._make_survivor(first), quorum)
        except KnobError as error:
            self._fail_run(str(error))
            return None
        if to.experiment.on_death == "replace":
            self._coming += [world.clock.now + REPLACEMENT_SECONDS] * (world.size - len(to.membership.members))
        for session in left:
            if session.member in to.mark["spare"]:
                session.mark_end("stopped")
        return to

    def _list_saved(self) -> list[int]:
        return (
            []
            if self._folder is None
            else [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(self._folder)]
        )

    def _make_survivor(self, session: Session) -> RemainingRank:
        members, folder = self.world.members, self._folder
        return RemainingRank(
            member=session.member, place=session.rank.id, size=self.world.size, run=session, mark=session.mark,
            find_missing=lambda here: ([m for m in members if m not in here], []),
            checkpoint_path=lambda step: str(folder / checkpoints.name(step)),
        )  # fmt: skip

    def _fail_run(self, reason: str = "") -> None:
        for session in self.world.living_sessions:
            if reason:
                about = {"rank": session.member, "step": session.rank.step, "op": "", "type": "KnobError"}
                session.mark("error", about | {"text": reason})
            session.mark_end("failed")
        self.world.sessions[0].mark("state", {"state": "failed", "detail": reason})

    # -- new ranks --

    def _schedule_joins(self) -> None:
        world = self.world
        for at in sorted(set(self._coming)):
            world.clock.resume_if_reached(max(at, world.clock.now), TimedCall(self._plan_join))

    def _plan_join(self) -> None:
        """Ready replacements join before the next step that no rank has begun."""
        world = self.world
        count = sum(at <= world.clock.now for at in self._coming)
        known = [c for session in world.sessions for c in session.queue.planned if isinstance(c, JoinEvent)]
        if not count or world.fallen or world.parted is not None or 0 < len(known) < len(world.sessions):
            return  # some ranks have begun a planned join; these replacements join after it
        self._coming = [at for at in self._coming if at > world.clock.now]
        step, new = max(s.rank.step for s in world.sessions) + 1, tuple(range(self._next, self._next + count))
        self._next += count
        join = JoinEvent(known[0].at_step, new=(*known[0].new, *new)) if known else JoinEvent(step, new=new)
        for session in world.sessions:
            session.queue.drop_events(JoinEvent)
            session.queue.plan_event(join)

    def _plan_growth(self) -> NextGeneration:
        """Returns how all ranks continue with the new ones after the meeting."""
        new, e, used = self.world.parted
        first, stay = self.world.sessions[0], tuple(range(self.world.size))
        for session in self.world.sessions:
            session.leave_generation([])
        came = Membership((*self.world.members, *new), stay, stay, stay, first.rank.step)
        text = (
            f"{format_ranks(new)} {conjugate_be(new)} added; {format_ranks(came.members)} train from step {came.step}"
        )
        mark = {"members": came.members, "gone": [], "spare": [], "new": new, "step": came.step, "text": text,
                "settings": e.plain()}  # fmt: skip
        return NextGeneration(came, e, first.queue.obeyed, {}, False, 0, [], [], mark, used)

    # -- the next generation --

    def _begin_generation(self, to: NextGeneration) -> list[Session]:
        before, came = self.world, to.membership
        planned = [c for c in before.sessions[came.places[0]].queue.planned if isinstance(c, Change)]
        lost = before.parted is None
        size, now = len(came.members), before.clock.now + (VOTE_SECONDS if lost else 0.0)
        keeper = CheckpointStore(self._folder, size) if before.keeper is not None else None
        self.world = world = VirtualWorld(
            size, before.costs, before.seed, planned, before.real, members=came.members, now=now,
            mortal=before.mortal, keeper=keeper,
        )  # fmt: skip
        self.records.append(world.record)
        sessions = [self._make_session(before, world, place, to) for place in range(world.size)]
        sessions[0].mark("members", {**to.mark, "turn": len(self.records) - 1})
        if not sessions[0].learner.indexed:
            sessions[0].mark("data", describe_repeats(NO_INDEX_TEXT))
        return sessions

    def _make_session(self, before: VirtualWorld, world: VirtualWorld, place: int, to: NextGeneration) -> Session:
        came, e = to.membership, to.experiment
        if place >= len(came.places):
            return Session(world, place, e, self._made(e, place), None, to)
        was = before.sessions[came.places[place]]
        path = came.salvaged.checkpoint if came.salvaged is not None else ""
        if not path:
            return Session(world, place, e, was.body, was, to)
        checkpoint = checkpoints.Checkpoint.open(path)
        former = open_images(checkpoint, checkpoints.CheckpointFiles(checkpoint))
        session = Session(world, place, e, was.body, was, to._replace(examples_used=former.used))
        session.restore_images(former)
        return session
