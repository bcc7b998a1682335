"""Fibers: coroutines under way on one rank, and the lanes on which children run one after the other.

A fiber is resumed with an answer and runs until it asks for something that takes time. A step is a fiber, and so
are its background and every child. See "The trampoline" in workbench/DESIGN.md; here nothing is unusual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from workbench.rank import Group, Op

if TYPE_CHECKING:
    from workbench.sim.collective import Collective
    from workbench.sim.host import Host

PARK = object()  # a verb's answer: go on later
END = object()  # a verb's answer: the loop over buckets is over
_PERFORM = object()
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
                    op = send(value) if value is not END else coro.throw(StopAsyncIteration())
                except StopIteration as stop:
                    value = stop.value
                    break
                value = verbs[op.verb](self, op)
                if value is PARK:
                    return
            else:
                self.host.world.spins(self, op)
        except Exception as error:
            self.name_in(error)
            raise
        self.end(value)

    def name_in(self, error: Exception) -> None:
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

    __slots__ = ("by", "priority")

    def __init__(self, host: Host, coro: Coroutine[Op, Any, Any], name: str, origin: str, priority: int) -> None:
        self.host, self.coro, self.name, self.origin, self.priority = host, coro, name, origin, priority
        self.resumed = host.clock.now
        self.step = host.rank.step
        self.done = False
        self.value = self.waiter = self.on = self.passing = None
        self.by: Any = None  # an optimizer's settings when it was started

    def end(self, value: Any) -> None:
        self.done, self.value = True, value
        self.host.ledger.buffers.give(self, value if self.waiter is None else None)
        assert self.lane is not None
        self.lane.next()
        waiter = self.waiter
        if waiter is not None:
            host, since = self.host, self.since
            host.record.span(host.index, host.rank.step, "wait", self.name, since, since, host.clock.now, 0)
            waiter.on = None
            waiter.resume(value)


class CodedChild(Child):
    """A child whose own work between two operations takes the time that its codec is known to take.

    codec: seconds of each stretch of work, the last one for all further ones
    """

    __slots__ = ("codec", "measures", "op", "stretch")

    def __init__(self, host: Host, coro: Coroutine[Op, Any, Any], name: str, origin: str, priority: int,
                 codec: tuple[float, ...]) -> None:
        super().__init__(host, coro, name, origin, priority)
        self.codec, self.stretch = codec, 0
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
        except Exception as error:
            self.name_in(error)
            raise
        else:
            self._work(_Then(self.resume, _PERFORM))

    def _work(self, then: _Then) -> None:
        """A stretch of own work has been done; it takes its time before `then`."""
        seconds = 0.0 if self.measures else self.codec[min(self.stretch, len(self.codec) - 1)]
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

    Children run in the order of their start until one comes with a priority. From then on rank 0 decides: what it
    begins next is what every rank begins next, so that ranks whose children come at different times still agree.
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
        self.started = self.begun = 0

    def add(self, child: Child) -> None:
        """Puts a child behind those that were started before it."""
        child.lane = self
        self.started += 1
        if self.order.led or child.priority:
            return self.order.add(self, child, self.started - 1)
        if self.busy is None:
            self.busy = child
            self.begun += 1
            child.resume(None)
        else:
            self.queue.append(child)

    def next(self) -> None:
        """The child on this lane is over."""
        if self.order.led:
            self.busy = None
            self.order.go(self)
        elif self.queue:
            self.busy = self.queue.popleft()
            self.begun += 1
            self.busy.resume(None)
        else:
            self.busy = None

    def unfinished(self) -> list[Child]:
        """The child whose turn it is and those that wait."""
        return [*([self.busy] if self.busy else []), *self.queue, *self.order.waiting(self)]


class Order:
    """The order in which children of a lane begin on every rank, once one of them has a priority: rank 0's."""

    def __init__(self) -> None:
        self.led = False
        self.begun: list[int] = []  # the numbers of the children that rank 0 has begun, in that order
        self._ready: dict[Lane, dict[int, Child]] = {}

    def add(self, lane: Lane, child: Child, number: int) -> None:
        if not self.led:
            self._take_over(lane)
        self._ready.setdefault(lane, {})[number] = child
        self.go(lane)

    def _take_over(self, asking: Lane) -> None:
        """What any rank has begun so far was in order of start; what waits in queues is taken over."""
        self.led = True
        lanes = [h.lanes[asking.name] for h in asking.host.world.hosts if asking.name in h.lanes]
        for lane in lanes:
            self._ready[lane] = {lane.begun + i: child for i, child in enumerate(lane.queue)}
            lane.queue.clear()
        self.begun = list(range(max(lane.begun for lane in lanes)))

    def waiting(self, lane: Lane) -> list[Child]:
        return list(self._ready.get(lane, {}).values())

    def go(self, lane: Lane) -> None:
        """Begins the next child of a lane, if its turn has come."""
        ready = self._ready.setdefault(lane, {})
        if lane.busy is not None:
            return
        if lane.begun == len(self.begun):
            if lane.host.index or not ready:
                return
            self.begun.append(max(ready, key=lambda n: (ready[n].priority, -n)))
            self._begin(lane, ready)
            for other in list(self._ready):
                if other is not lane:
                    self.go(other)
        elif self.begun[lane.begun] in ready:
            self._begin(lane, ready)

    def _begin(self, lane: Lane, ready: dict[int, Child]) -> None:
        lane.busy = ready.pop(self.begun[lane.begun])
        lane.begun += 1
        lane.busy.resume(None)
