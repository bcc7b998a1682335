"""The virtual clock: events in order of time, and at equal times in the order in which they were set."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Protocol


class Resumable(Protocol):
    """Whatever can be woken at a time: a fiber, a meeting that ends."""

    def resume(self, value: Any) -> None: ...


class Clock:
    """Seconds since the simulated run began; it jumps from one event to the next.

    >>> clock = Clock()
    >>> class Bell:
    ...     def resume(self, value): print(clock.now, value)
    >>> clock.at(2.0, Bell(), "two"); clock.at(1.0, Bell(), "one"); clock.run()
    1.0 one
    2.0 two
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Resumable, Any]] = []
        self._set = 0

    def at(self, t: float, what: Resumable, value: Any = None) -> None:
        """Resumes `what` with `value` at time `t`."""
        self._set += 1
        heappush(self._events, (t, self._set, what, value))

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        events = self._events
        while events:
            self.now, _, what, value = heappop(events)
            what.resume(value)
