"""The virtual clock: runs events in order of time, and of their setting at equal times."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Protocol


class Resumable(Protocol):
    """A fiber, or a collective that ends."""

    def resume(self, value: Any) -> None: ...


class VirtualClock:
    """A clock that jumps from event to event. now: seconds since the simulated run began

    >>> clock = VirtualClock()
    >>> class Bell:
    ...     def resume(self, value): print(clock.now, value)
    >>> clock.resume_at(2.0, Bell(), "two"); clock.resume_at(1.0, Bell(), "one"); clock.run_events()
    1.0 one
    2.0 two
    True
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._times: list[float] = []  # a heap without duplicates: thousands of ranks are due at one time
        self._due: dict[float, list[tuple[Resumable, Any]]] = {}  # by time
        self._aside: dict[float, int] = {}  # by time: how many of these events do not keep the clock running

    def resume_at(self, t: float, what: Resumable, value: Any = None) -> None:
        """t: now or later"""
        due = self._due.get(t)
        if due is not None:
            due.append((what, value))
        else:
            self._due[t] = [(what, value)]
            heappush(self._times, t)

    def resume_if_reached(self, t: float, what: Resumable) -> None:
        """This event does not keep the clock running."""
        self._aside[t] = self._aside.get(t, 0) + 1
        self.resume_at(t, what)

    def _has_events(self) -> bool:
        if len(self._times) > len(self._aside):
            return True
        return any(len(self._due[t]) > self._aside.get(t, 0) for t in self._times)

    def run_events(self, at_once: int = 1_000_000) -> bool:
        """Returns False if more than `at_once` events are due at one time."""
        times, every = self._times, self._due
        while times and (not self._aside or self._has_events()):
            self.now = now = heappop(times)
            happened = 0
            while due := every[now]:
                if happened >= at_once:
                    heappush(times, now)
                    return False
                every[now] = []  # new events of this time come after the due ones
                for what, value in due:
                    what.resume(value)
                happened += len(due)
            del every[now]
            if self._aside:
                self._aside.pop(now, None)
        return True
