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
    True
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Resumable, Any]] = []
        self._set = 0

    def at(self, t: float, what: Resumable, value: Any = None) -> None:
        """Resumes `what` with `value` at time `t`."""
        self._set += 1
        heappush(self._events, (t, self._set, what, value))

    def run(self, at_once: int = 1_000_000) -> bool:
        """Runs until nothing is left to happen; False when so much has happened at one time and there is more."""
        events = self._events
        while events:
            began = self.now
            for _ in range(at_once):
                if not events:
                    return True
                self.now, _, what, value = heappop(events)
                what.resume(value)
            if events and self.now == began:
                return False
        return True
