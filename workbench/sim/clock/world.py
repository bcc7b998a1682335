"""The simulated world: all ranks on one clock, their meetings, and the detection of deadlocks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from workbench.experiment import Experiment
from workbench.host.core.planned_event import Planned
from workbench.host.elastic.reentry import Membership
from workbench.host.loop.generation import train_in_generation
from workbench.rank import Group, Op
from workbench.sim.clock.deadlock import Deadlock, explain_deadlock, explain_endless_loop, explain_standstill
from workbench.sim.clock.fiber import PARKED, ChildOrder, Fiber, MeetingView
from workbench.sim.clock.mailboxes import Mailboxes
from workbench.sim.clock.world_state import WorldState
from workbench.sim.costs.chance_replay import ChanceReplay
from workbench.sim.costs.costs import Costs

MAX_EVENTS_AT_ONCE = 500_000  # events at one time before the run counts as standing still
MORE_EVENTS_PER_RANK = 2_000  # the same, in addition for each rank
CRASH_NOTICE_SECONDS = 0.23  # seconds until the other ranks notice a crash: the median of 101 kills of real ranks


class SimulationStopped(BaseException):
    """A rank ends the simulation before its last step, as `on_nan` demands."""


class VirtualWorld(WorldState):
    """State that the ranks of one simulation share.

    first:   number of simulated ranks; each stands for the ranks at its position in the other replicas
    members: by place, the rank's number in the run; now: when these ranks begin
    mortal:  whether ranks may crash; keeper: takes the contents of a checkpoint; saved: by rank, the state to continue
             from
    fallen:  places of crashed ranks; parted: new ranks and settings, if the ranks have met to let more ranks join
    """

    def __init__(
        self,
        size: int,
        costs: Costs | None,
        seed: int,
        planned: Sequence[Planned],
        real: bool,
        replay: ChanceReplay | None = None,
        first: int = 0,
        members: Sequence[int] = (),
        now: float = 0.0,
        mortal: bool = False,
        keeper: Any = None,
        saved: Any = None,
    ) -> None:
        super().__init__(size, costs, seed, replay, first, members, now)
        self.planned, self.real = planned, real
        self.mortal, self.keeper, self.saved = mortal, keeper, saved
        self.mail = Mailboxes(self)
        self.sessions: list[Any] = []
        self.lives: list[Fiber] = []
        self.open: dict[str, dict[tuple[Group | None, int], MeetingView]] = {}  # collectives under way, by lane
        self.orders: dict[str, ChildOrder] = {}
        self._gathered: dict[tuple[str, Group | None], dict[int, tuple[Fiber, Any]]] = {}
        # by name and group of a broadcast: the values so far, each rank's number of requests, the waiting fibers
        self._said: dict[tuple[str, Group | None], tuple[list[Any], Counter[int], list[Fiber]]] = {}
        self.ended = 0
        self.over = False  # whether all ranks have finished their steps
        self.done: set[int] = set()  # ranks that are idle until the next meeting
        self.latest = self.due = 0  # at the last meeting: the highest step, the planned changes due
        self.meets = -1  # the step of the next meeting; -1: none
        self.wanted = False  # whether a rank wants a meeting, because its model has unfrozen a parameter
        self._listening: list[Fiber] = []
        self._raised: dict[int, tuple[int, int]] = {}  # by rank, the step and the first bucket of its last hand
        self.fallen: set[int] = set()
        self.stopped = False  # whether a rank ended the simulation
        self.parted: Any = None

    def run_ranks(self, sessions: list[Any], came: Membership | None = None) -> None:
        """Runs all ranks until they end, crash or let more ranks join. came: how these ranks came together.

        Raises Deadlock.
        """
        self.sessions = sessions
        self._hosts = [s.host for s in sessions]
        self.lives += [
            Fiber(
                s.host,
                self._run_life(s.train_from_start() if came is None else train_in_generation(s, came)),
                "step",
            )
            for s in sessions
        ]
        try:
            self._run_to_end()
        except SimulationStopped:
            self.stopped = True
            for session in sessions:
                session.mark_stopped()

    async def _run_life(self, life: Coroutine[Any, Any, None]) -> None:
        await life
        self.ended += 1

    @property
    def living_sessions(self) -> list[Any]:
        return [s for s, life in zip(self.sessions, self.lives, strict=True)
                if not life.done and s.rank.id not in self.fallen]  # fmt: skip

    def note_crash(self, fiber: Fiber) -> None:
        if not self.fallen:
            self.clock.resume_at(self.clock.now + CRASH_NOTICE_SECONDS, TimedCall(self._cut_off_ranks))
        self.fallen.add(fiber.host.index)
        fiber.host.end_requests()

    def _cut_off_ranks(self) -> None:
        """Stops each rank at its next joint operation."""
        self.missed = True
        for host in self._hosts:
            host.cut_off()

    def _run_to_end(self) -> None:
        for fiber in self.lives:
            fiber.resume(None)
        self._run_events()
        for _ in range(MAX_EVENTS_AT_ONCE):
            if self.ended == self.first or self.fallen or self.parted is not None:
                return
            if not self.mail.release_receiver():
                raise Deadlock(explain_deadlock(self))
            self._run_events()
        raise Deadlock(explain_standstill(self))

    def _run_events(self) -> None:
        if not self.clock.run_events(MAX_EVENTS_AT_ONCE + MORE_EVENTS_PER_RANK * self.first):
            raise Deadlock(explain_standstill(self))

    def raise_endless_loop(self, fiber: Fiber, op: Op) -> None:
        """Raises Deadlock for a fiber whose requests take no time and never end."""
        raise Deadlock(explain_endless_loop(fiber, op))

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that never started are not awaited
            for host in self._hosts:
                for fiber in host.list_unfinished():
                    fiber.coro.close()
            for fiber in self.lives:
                if isinstance(fiber.on, Fiber):
                    fiber.on.coro.close()
                fiber.coro.close()

    # -- meetings outside the network --

    def gather_ranks(
        self,
        fiber: Fiber,
        what: str,
        mine: Any,
        joint: Callable[[list[Any]], list[Any]],
        seconds: float,
        group: Group | None = None,
    ) -> Any:
        """Gathers `mine` from every rank of a group (None: all). The last one calls `joint`, which answers every rank.

        seconds: from the last arrival to the answers
        """
        come = self._gathered.setdefault((what, group), {})
        come[fiber.host.index] = fiber, mine
        fiber.park(what)
        here = self.list_simulated_ranks(group)
        if len(come) < len(here):
            return PARKED
        del self._gathered[what, group]
        members = range(self.size) if group is None else group.ranks
        answers = joint([come[r % self.first][1] for r in members])
        for r, answer in zip(members, answers, strict=True):
            if r < self.first:
                come[r][0].answer_at(self.clock.now + seconds, answer)
        return PARKED

    def broadcast_value(self, fiber: Fiber, what: str, mine: Any, group: Group | None = None) -> Any:
        """Answers all ranks, or a group's, with the first rank's `mine`. Only the first rank never waits."""
        said, heard, waiting = self._said.setdefault((what, group), ([], Counter(), []))
        number, index = heard[fiber.host.index], fiber.host.index
        heard[index] += 1
        if index != self.list_simulated_ranks(group)[0]:
            if number < len(said):
                return said[number]
            waiting.append(fiber)
            return fiber.park(what)
        said.append(mine)
        for one in waiting:
            one.answer_at(self.clock.now, mine)
        waiting.clear()
        return mine

    def answer_round(self, fiber: Fiber, group: Group | None = None) -> Any:
        """Gathers all ranks or a group. Answers each with its newest step, or 0 if every rank is idle."""
        hosts = self.hosts if group is None else [self.hosts[r] for r in self.list_simulated_ranks(group)]

        def answer(_: list[Any]) -> list[int]:
            idle = all(host.rounds.is_idle for host in hosts)
            steps = [0 if idle else host.rounds.newest_step for host in hosts]
            answers = steps
            if self.replay is not None:
                recorded = [self.replay.next_answer(host.index) for host in hosts]
                answers = [step for step in recorded if step is not None]
                if len(answers) < len(steps):  # a rank's record is over, and ranks go on or end together
                    answers = steps
            for host, step in zip(hosts, answers, strict=True):
                host.note("again", step > 0)
            return answers

        return self.gather_ranks(fiber, "again", None, answer, self.ports.flag_seconds(), group)

    def add_listener(self, fiber: Fiber) -> None:
        self._listening.append(fiber)

    def make_unused_flags(self, rank: int) -> UnusedFlags:
        return UnusedFlags(self._raised, rank)

    def note_idle(self, rank: int, step: int) -> None:
        """Notes that a rank has nothing to do until a meeting. Calls the last meeting if that holds for every rank."""
        self.done.add(rank)
        if len(self.done) == self.size:
            self.over = True
            self.call_meeting(step)

    def begin_meeting(self, latest: int, due: int) -> None:
        """Begins the meeting of all ranks. latest: their highest step; due: the planned changes due"""
        self.latest, self.due, self.meets, self.wanted = latest, due, -1, False
        self.done.clear()

    def end_generation(self, new: Sequence[int], wanted: Experiment, used: int) -> None:
        """Ends the generation, so that `new` ranks join under the settings `wanted`. used: examples so far"""
        self.parted = new, wanted, used

    def request_meeting(self) -> None:
        self.wanted = True
        self._wake_listeners()

    def call_meeting(self, step: int) -> None:
        """Calls all ranks to a meeting: with `propagation` at `step`, otherwise at their next boundary."""
        self.meets = step
        self._wake_listeners()

    def _wake_listeners(self) -> None:
        listening, self._listening = self._listening, []
        for fiber in listening:
            fiber.wake_at(self.clock.now)


class UnusedFlags:
    """Flags of unused parameters. See [Note: The raised hand] in workbench/host/sharding/parameter_usage.py.

    raised: by rank, the last step with a raised flag and the first bucket that it is for; ranks share this dict
    """

    def __init__(self, raised: dict[int, tuple[int, int]], place: int) -> None:
        self._raised, self._place = raised, place

    def raise_in(self, step: int, bucket: int) -> None:
        if not self.raised_in(step, [self._place], bucket):
            self._raised[self._place] = step, bucket

    def raised_in(self, step: int, ranks: Iterable[int], bucket: int | None) -> bool:
        there = (first for rank in ranks for at, first in [self._raised.get(rank, (-1, 0))] if at == step)
        return any(bucket is None or first <= bucket for first in there)

    def close(self) -> None: ...


class TimedCall:
    """Calls a function at a set time."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def resume(self, _: Any) -> None:
        self._call()
