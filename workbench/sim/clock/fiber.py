"""Fibers: coroutines under way on one rank, and the lanes on which children run one after the other.

A fiber is resumed with an answer and runs until it asks for something that takes time. A step is a fiber, and so
are its background and every child. See "The trampoline" in workbench/DESIGN.md; here nothing is unusual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from workbench.rank import Group, Op

if TYPE_CHECKING:
    from workbench.sim.clock.collective import Collective
    from workbench.sim.compute.host import Host

PARK = object()  # a verb's answer: go on later
END = object()  # a verb's answer: the loop over buckets is over
_PERFORM = object()
ROOM = 32  # children that rank 0 chooses at a time, at most, as on the engine
MANY = 1_000_000  # answers in a row that took no time: whoever asks on will do so for ever


class Fiber:
    """A coroutine under way."""

    __slots__ = ("coro", "done", "host", "lane", "name", "on", "origin", "passing", "resumed", "since", "step", "value",
                 "waiter")

    def __init__(self, host: Host, coro: Coroutine[Op, Any, Any], name: str, origin: str = "") -> None:
        self.host, self.coro, self.name, self.origin = host, coro, name, origin
        self.resumed = host.clock.now
        self.step = host.rank.step
        self.lane: Lane | None = None  # whose turn this is; None for a step
        self.done = False
        self.value: Any = None
        self.waiter: Fiber | None = None
        self.since = 0.0  # when the waiter began to wait
        self.on: Any = None  # what it waits for, to say so when nothing can happen any more
        self.passing: Any = None  # the pass over buckets that it iterates

    def resume(self, value: Any) -> None:
        """Runs on with the answer to what it asked for."""
        coro, verbs = self.coro, self.host.verbs
        send = coro.send
        try:
            for _ in range(MANY):
                try:
                    op = send(value) if value is not END else self._leave_loop()
                except StopIteration as stop:
                    value = stop.value
                    break
                value = verbs[op.verb](self, op)
                if value is PARK:
                    return
            else:
                self.host.world.spins(self, op)
        except (Exception, SystemExit) as error:
            self.name_in(error)
            raise
        self.end(value)

    def _leave_loop(self) -> Op:
        """The loop over buckets is over; returns what the coroutine asks for then."""
        self.host.usage.handed_out(self.host.rank.step)
        return self.coro.throw(StopAsyncIteration())

    def name_in(self, error: BaseException) -> None:
        """Notes in an error where it happened, once."""
        if not getattr(error, "__notes__", None):
            rank, now = self.host.rank, self.host.clock.now
            error.add_note(f"on virtual rank {rank.id} in step {rank.step}, {self.name}, at {now:.6f} s")

    def end(self, value: Any) -> None:
        """The coroutine has returned."""
        self.done, self.value = True, value
        self.host.ended(self)


class Child(Fiber):
    """A child on its lane."""

    __slots__ = ("by", "number", "priority", "share")

    def __init__(self, host: Host, coro: Coroutine[Op, Any, Any], name: str, origin: str, priority: int,
                 share: float) -> None:
        self.host, self.coro, self.name, self.origin, self.priority = host, coro, name, origin, priority
        self.share, self.number = share, 0
        self.resumed = host.clock.now
        self.step = host.rank.step
        self.done = False
        self.value = self.waiter = self.on = self.passing = None
        self.by: Any = None  # an optimizer's settings when it was started

    def end(self, value: Any) -> None:
        self.done, self.value = True, value
        buffers, waiter = self.host.ledger.buffers, self.waiter
        buffers.give(self, value)
        assert self.lane is not None
        self.lane.next()  # what this child returns is there when that begins
        if waiter is not None:
            buffers.give(self)
            host, since = self.host, self.since
            host.record.span(host.index, host.rank.step, "wait", self.name, since, since, host.clock.now, 0)
            waiter.on = None
            waiter.resume(value)


class CodedChild(Child):
    """A child whose own work between two operations takes the time that its codec is known to take on so many bytes."""

    __slots__ = ("measures", "nbytes", "op", "stretch")

    def __init__(self, host: Host, coro: Coroutine[Op, Any, Any], name: str, origin: str, priority: int, share: float,
                 nbytes: int) -> None:
        super().__init__(host, coro, name, origin, priority, share)
        self.nbytes, self.stretch = nbytes, 0
        self.measures = False  # was what it asked for last a part of measuring? Then what follows is no codec's work
        self.op: Op | None = None

    def resume(self, value: Any) -> None:
        try:
            if value is _PERFORM:
                op, self.op = self.op, None
                assert op is not None
                self.measures = op.measures
                value = self.host.verbs[op.verb](self, op)
                if value is PARK:
                    return
            self.op = self.coro.send(value)
            while self.op.verb == "sample":  # takes no time, and what was done before it goes on after it
                self.op = self.coro.send(self.host.verbs["sample"](self, self.op))
        except StopIteration as stop:
            self._work(_Then(self.end, stop.value))
        except (Exception, SystemExit) as error:
            self.name_in(error)
            raise
        else:
            self._work(_Then(self.resume, _PERFORM))

    def _work(self, then: _Then) -> None:
        """A stretch of own work has been done; it takes its time before `then`."""
        seconds = 0.0 if self.measures else self.host.stretch_seconds(self.stretch, self.nbytes)
        self.stretch += 1
        clock = self.host.clock
        if seconds:
            self.host.span("codec", self.name, clock.now, clock.now, clock.now + seconds, 0, self.step)
        clock.at(clock.now + seconds, then)


class _Then:
    """Calls something when its time has come."""

    __slots__ = ("call", "value")

    def __init__(self, call: Any, value: Any) -> None:
        self.call, self.value = call, value

    def resume(self, _: Any) -> None:
        self.call(self.value)


class Lane:
    """One lane of one rank: children run one after the other; collectives on it meet those of the other ranks.

    Children run in the order of their start, but those with priorities, of which as many as come one after the other
    overtake each other. Of these rank 0 decides: what it begins next is what every rank begins next, so that ranks
    whose children come at different times still agree.
    """

    __slots__ = ("begun", "busy", "host", "met", "name", "open", "order", "queue", "started")

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name
        self.busy: Child | None = None
        self.queue: deque[Child] = deque()
        self.met: dict[Group | None, int] = {}  # collectives asked for so far, by group
        # collectives under way, by group and number
        self.open: dict[tuple[Group | None, int], Collective] = host.world.open.setdefault(name, {})
        self.order = host.world.orders.setdefault(name, Order())
        self.order.lanes.append(self)
        self.started = self.begun = 0

    def add(self, child: Child) -> None:
        """Puts a child behind those that were started before it."""
        child.lane, child.number = self, self.started
        self.started += 1
        self.queue.append(child)
        self.go()

    def next(self) -> None:
        """The child on this lane is over."""
        self.busy = None
        self.go()

    def go(self) -> None:
        """Begins the next child, if the lane is free and its turn has come."""
        if self.busy is not None or not self.queue:
            return
        first = self.queue[0]
        child = self.order.turn(self) if first.priority else first
        if child is None:
            return
        if child is first:
            self.queue.popleft()
        else:
            self.queue.remove(child)
        self.busy = child
        self.begun += 1
        child.resume(None)

    def count_anew(self) -> None:
        """Nothing waits, and all ranks count from here."""
        self.started = self.begun = 0
        if not self.host.index:
            self.order.forget()

    @property
    def aside(self) -> str:
        """What the messages of its all-reduces are told apart by from those of the first lane's."""
        return "" if self.name == "comm" else f" on {self.name}".rstrip()

    def unfinished(self) -> list[Child]:
        """The child whose turn it is and those that wait."""
        return [*([self.busy] if self.busy else []), *self.queue]


class Order:
    """The order in which children of a lane begin that have priorities: rank 0's, on every rank."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._chosen: dict[int, int] = {}  # by how many have begun before it, the number of a child
        self._asking = False

    def turn(self, lane: Lane) -> Child | None:
        """The child of a lane whose turn it is, if that is known and it was started there."""
        number = self._chosen.get(lane.begun)
        if number is None:
            if not lane.host.index and not self._asking:
                self._choose(lane)
            return None
        return next((child for child in lane.queue if child.number == number), None)

    def forget(self) -> None:
        """What was chosen so far has begun."""
        self._chosen.clear()

    def _choose(self, lane: Lane) -> None:
        """Rank 0 chooses of what is there, until the shares make one, and tells: that takes as long as any flag."""
        free = list(takewhile(lambda child: child.priority > 0, lane.queue))
        found: list[int] = []
        share = 0.0
        for child in sorted(free, key=lambda child: (-child.priority, child.number)):
            if share >= 1.0 or len(found) == ROOM:
                break
            found.append(child.number)
            share += child.share
        self._asking = True
        clock = lane.host.clock
        clock.at(clock.now + lane.host.world.ports.flag(), _Then(self._told, (lane.begun, found)))

    def _told(self, said: tuple[int, list[int]]) -> None:
        begun, found = said
        self._asking = False
        past = min(lane.begun for lane in self.lanes)
        self._chosen = {at: number for at, number in self._chosen.items() if at >= past}
        self._chosen |= {begun + i: number for i, number in enumerate(found)}
        for lane in list(self.lanes):
            lane.go()
