"""Fibers (coroutines under way on one rank) and lanes, on which children run one after the other.

A fiber gets an answer and runs until it requests something that takes time. A step, its background and every child are
fibers. See "The trampoline" in workbench/DESIGN.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from workbench.rank import Group, Op

if TYPE_CHECKING:
    from workbench.experiment import Experiment
    from workbench.host.memory.memory_account import MemoryAccount
    from workbench.host.sharding.parameter_usage import ParameterUsage
    from workbench.rank import Rank
    from workbench.sim.clock.clock import VirtualClock
    from workbench.sim.clock.network_ports import Ports
    from workbench.sim.clock.record import Record
    from workbench.sim.costs.chance_replay import ChanceReplay

PARKED = object()  # a verb's answer: the fiber goes on later
PASS_OVER = object()  # a verb's answer: the loop over buckets is over
_PERFORM = object()
MAX_CHOSEN = 32  # by rank 0 at a time, at most; as on the engine
MAX_INSTANT_ANSWERS = 1_000_000  # without time passing: an endless loop


class MeetingView(Protocol):
    """A collective under way. left: ranks that have not arrived"""

    left: int

    def add_rank(self, fiber: Fiber, op: Op) -> None: ...


class Waiter(Protocol):
    """Waits for the result of a fiber inside it."""

    def answer(self, value: Any, now: float) -> None: ...


class WorldView(Protocol):
    """The simulated world of fibers and lanes. open: collectives under way, by lane"""

    @property
    def ports(self) -> Ports: ...
    @property
    def replay(self) -> ChanceReplay | None: ...
    @property
    def open(self) -> dict[str, dict[tuple[Group | None, int], MeetingView]]: ...
    @property
    def orders(self) -> dict[str, ChildOrder]: ...

    def raise_endless_loop(self, fiber: Fiber, op: Op) -> None: ...

    def answer_round(self, fiber: Fiber, group: Group | None = None) -> Any: ...


class RankState(Protocol):
    """The state of a virtual rank."""

    @property
    def sent_bytes(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def rank(self) -> Rank: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def clock(self) -> VirtualClock: ...
    @property
    def record(self) -> Record: ...
    @property
    def memory_account(self) -> MemoryAccount: ...
    @property
    def usage(self) -> ParameterUsage: ...
    @property
    def leaving(self) -> bool: ...

    def count_sent(self, nbytes: int) -> None: ...


class HostView(RankState, Protocol):
    """A rank's host, as its fibers see it. ended: takes a fiber that has ended"""

    @property
    def world(self) -> WorldView: ...
    @property
    def verbs(self) -> Mapping[str, Callable[[Fiber, Op], Any]]: ...
    @property
    def ended(self) -> Callable[[Fiber], None]: ...

    def span(self, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int, step: int = -1) -> None:
        """step: -1 for the present step"""

    def note(self, name: str, value: float) -> None: ...

    def stretch_seconds(self, number: int, nbytes: int) -> float: ...

    def end_requests(self) -> None: ...


class Fiber:
    """A coroutine under way."""

    __slots__ = ("coro", "done", "host", "lane", "name", "on", "origin", "passing", "resumed", "since", "step", "value",
                 "waiter")  # fmt: skip

    def __init__(self, host: HostView, coro: Coroutine[Op, Any, Any], name: str, origin: str = "",
                 waiter: Waiter | None = None, lane: Lane | None = None) -> None:  # fmt: skip
        """waiter: gets the result; lane: None for a step"""
        self.host, self.coro, self.name, self.origin = host, coro, name, origin
        self.resumed = host.clock.now
        self.step = host.rank.step
        self.lane, self.waiter = lane, waiter
        self.done = False
        self.value: Any = None
        self.since = 0.0  # when the waiter began to wait
        self.on: Any = None  # its wait, to explain a deadlock
        self.passing: Any = None  # the pass over buckets that it iterates

    def resume(self, value: Any) -> None:
        coro, verbs = self.coro, self.host.verbs
        send = coro.send
        try:
            for _ in range(MAX_INSTANT_ANSWERS):
                try:
                    op = send(value) if value is not PASS_OVER else self._leave_loop()
                except StopIteration as stop:
                    value = stop.value
                    break
                value = verbs[op.verb](self, op)
                if value is PARKED:
                    return
            else:
                self.host.world.raise_endless_loop(self, op)
        except (Exception, SystemExit) as error:
            self.note_place(error)
            raise
        self.end(value)

    def park(self, on: Any) -> Any:
        """Lets this fiber wait on an object until another part of the simulator resumes it. Returns PARKED."""
        self.on = on
        return PARKED

    def wake(self, value: Any = None) -> None:
        """Ends a wait now."""
        self.on = None
        self.resume(value)

    def wake_at(self, t: float, value: Any = None) -> None:
        """Ends a wait at time `t`."""
        self.on = None
        self.host.clock.resume_at(t, self, value)

    def answer(self, value: Any, now: float) -> None:
        """Answers a request now; the next request counts from here."""
        self.resumed = now
        self.resume(value)

    def answer_at(self, t: float, value: Any) -> None:
        """Ends a wait with an answer at time `t`; the next request counts from there."""
        self.resumed = t
        self.wake_at(t, value)

    def enter_step(self) -> None:
        """Goes on in the rank's present step, as a background does in each round."""
        self.step = self.host.rank.step

    def begin_pass(self, passing: Any) -> None:
        """Begins to iterate over the buckets of a pass."""
        self.passing = passing

    def _leave_loop(self) -> Op:
        """Ends the loop over buckets. Returns the coroutine's next request."""
        self.host.usage.note_handed_out(self.host.rank.step)
        return self.coro.throw(StopAsyncIteration())

    def note_place(self, error: BaseException) -> None:
        """Adds to an error, once, where it happened."""
        if not getattr(error, "__notes__", None):
            rank, now = self.host.rank, self.host.clock.now
            error.add_note(f"on virtual rank {rank.id} in step {rank.step}, {self.name}, at {now:.6f} s")

    def end(self, value: Any) -> None:
        self.done, self.value = True, value
        self.host.ended(self)


class ChildFiber(Fiber):
    """A child on its lane."""

    __slots__ = ("by", "number", "priority", "share")
    waiter: Fiber | None

    def __init__(self, host: HostView, coro: Coroutine[Op, Any, Any], name: str, origin: str, priority: int,
                 share: float, by: Any) -> None:  # fmt: skip
        """by: optimizer settings at the start"""
        self.host, self.coro, self.name, self.origin, self.priority = host, coro, name, origin, priority
        self.share, self.number = share, 0
        self.resumed = host.clock.now
        self.step = host.rank.step
        self.done = False
        self.value = self.waiter = self.on = self.passing = None
        self.by = by

    def join_lane(self, lane: Lane, number: int) -> None:
        self.lane, self.number = lane, number

    def park_waiter(self, waiter: Fiber) -> Any:
        """Lets a fiber wait for this child. Returns PARKED."""
        self.waiter, self.since = waiter, self.host.clock.now
        return waiter.park(self)

    def end(self, value: Any) -> None:
        self.done, self.value = True, value
        buffers, waiter = self.host.memory_account.buffers, self.waiter
        buffers.note_end(self, value)
        assert self.lane is not None
        self.lane.begin_next()  # the next child can use what this child returns
        if waiter is not None:
            buffers.note_end(self)
            host, since = self.host, self.since
            host.record.span(host.index, host.rank.step, "wait", self.name, since, since, host.clock.now, 0)
            waiter.wake(value)


class CodedChildFiber(ChildFiber):
    """A child that spends a codec's time for `nbytes` bytes between two operations."""

    __slots__ = ("measures", "nbytes", "op", "stretch")

    def __init__(self, host: HostView, coro: Coroutine[Op, Any, Any], name: str, origin: str, priority: int,
                 share: float, by: Any, nbytes: int) -> None:  # fmt: skip
        super().__init__(host, coro, name, origin, priority, share, by)
        self.nbytes, self.stretch = nbytes, 0
        self.measures = False  # whether the last request was part of measuring; no codec work follows then
        self.op: Op | None = None

    def resume(self, value: Any) -> None:
        try:
            if value is _PERFORM:
                op, self.op = self.op, None
                assert op is not None
                self.measures = op.measures
                value = self.host.verbs[op.verb](self, op)
                if value is PARKED:
                    return
            self.op = self.coro.send(value)
            while self.op.verb == "sample":  # takes no time and does not end the stretch of work
                self.op = self.coro.send(self.host.verbs["sample"](self, self.op))
        except StopIteration as stop:
            self._spend_codec_time(_TimedAnswer(self.end, stop.value))
        except (Exception, SystemExit) as error:
            self.note_place(error)
            raise
        else:
            self._spend_codec_time(_TimedAnswer(self.resume, _PERFORM))

    def _spend_codec_time(self, then: _TimedAnswer) -> None:
        seconds = 0.0 if self.measures else self.host.stretch_seconds(self.stretch, self.nbytes)
        self.stretch += 1
        clock = self.host.clock
        if seconds:
            self.host.span("codec", self.name, clock.now, clock.now, clock.now + seconds, 0, self.step)
        clock.resume_at(clock.now + seconds, then)


class _TimedAnswer:
    """Calls a function at a set time."""

    __slots__ = ("call", "value")

    def __init__(self, call: Any, value: Any) -> None:
        self.call, self.value = call, value

    def resume(self, _: Any) -> None:
        self.call(self.value)


class Lane:
    """A lane of one rank.

    Children run in the order of their start, but consecutive children with priorities may overtake each other. Rank 0
    decides this order for all ranks, because their children start at different times.
    """

    __slots__ = ("begun", "busy", "host", "met", "name", "open", "order", "queue", "started")

    def __init__(self, host: HostView, name: str) -> None:
        self.host, self.name = host, name
        self.busy: ChildFiber | None = None
        self.queue: deque[ChildFiber] = deque()
        self.met: dict[Group | None, int] = {}  # collectives requested so far, by group
        # by group and number
        self.open: dict[tuple[Group | None, int], MeetingView] = host.world.open.setdefault(name, {})
        self.order = host.world.orders.setdefault(name, ChildOrder())
        self.order.lanes.append(self)
        self.started = self.begun = 0

    def queue_child(self, child: ChildFiber) -> None:
        child.join_lane(self, self.started)
        self.started += 1
        self.queue.append(child)
        self.begin_if_free()

    def begin_next(self) -> None:
        self.busy = None
        self.begin_if_free()

    def begin_if_free(self) -> None:
        if self.busy is not None or not self.queue:
            return
        first = self.queue[0]
        child = self.order.next_child(self) if first.priority else first
        if child is None:
            return
        if child is first:
            self.queue.popleft()
        else:
            self.queue.remove(child)
        self.busy = child
        self.begun += 1
        child.resume(None)

    def reset_counts(self) -> None:
        """All ranks call it together, with no child waiting."""
        self.started = self.begun = 0
        if not self.host.index:
            self.order.forget_choices()

    @property
    def name_suffix(self) -> str:
        """Distinguishes this lane's all-reduce messages from the first lane's."""
        return "" if self.name == "comm" else f" on {self.name}".rstrip()

    def list_unfinished(self) -> list[ChildFiber]:
        return [*([self.busy] if self.busy else []), *self.queue]


class ChildOrder:
    """Rank 0's order of the children with priorities on one lane."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._chosen: dict[int, int] = {}  # a child's number, by the number of children that begin before it
        self._asking = False

    def next_child(self, lane: Lane) -> ChildFiber | None:
        """Returns the child that may begin; None if the order is unknown or the child has not started."""
        number = self._chosen.get(lane.begun)
        if number is None:
            if not lane.host.index and not self._asking:
                self._choose_children(lane)
            return None
        return next((child for child in lane.queue if child.number == number), None)

    def forget_choices(self) -> None:
        self._chosen.clear()

    def _choose_children(self, lane: Lane) -> None:
        """Chooses queued children on rank 0 until their shares add up to 1. Ranks follow after `flag_seconds`."""
        free = list(takewhile(lambda child: child.priority > 0, lane.queue))
        found: list[int] = []
        share = 0.0
        for child in sorted(free, key=lambda child: (-child.priority, child.number)):
            if share >= 1.0 or len(found) == MAX_CHOSEN:
                break
            found.append(child.number)
            share += child.share
        self._asking = True
        clock = lane.host.clock
        clock.resume_at(
            clock.now + lane.host.world.ports.flag_seconds(), _TimedAnswer(self._apply_choice, (lane.begun, found))
        )

    def _apply_choice(self, said: tuple[int, list[int]]) -> None:
        begun, found = said
        self._asking = False
        past = min(lane.begun for lane in self.lanes)
        self._chosen = {at: number for at, number in self._chosen.items() if at >= past}
        self._chosen |= {begun + i: number for i, number in enumerate(found)}
        for lane in list(self.lanes):
            lane.begin_if_free()
