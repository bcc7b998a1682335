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

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._times: list[float] = []  # a heap, each once: alike ranks are due in their thousands at one time
        self._due: dict[float, list[tuple[Resumable, Any]]] = {}  # by time
        self._aside: dict[float, int] = {}  # by time, how many of these are waited for by nobody

    def at(self, t: float, what: Resumable, value: Any = None) -> None:
        """Resumes `what` with `value` at time `t`, which is not over."""
        due = self._due.get(t)
        if due is not None:
            due.append((what, value))
        else:
            self._due[t] = [(what, value)]
            heappush(self._times, t)

    def aside(self, t: float, what: Resumable) -> None:
        """Resumes `what` at time `t` if the clock comes to that, which does not run for it alone."""
        self._aside[t] = self._aside.get(t, 0) + 1
        self.at(t, what)

    def _runs(self) -> bool:
        """Is anything left that does not only happen aside?"""
        if len(self._times) > len(self._aside):
            return True
        return any(len(self._due[t]) > self._aside.get(t, 0) for t in self._times)

    def run(self, at_once: int = 1_000_000) -> bool:
        """Runs until nothing is left to happen; False when so much has happened at one time and there is more."""
        times, every = self._times, self._due
        while times and (not self._aside or self._runs()):
            self.now = now = heappop(times)
            happened = 0
            while due := every[now]:
                if happened >= at_once:
                    heappush(times, now)
                    return False
                every[now] = []  # what is set for this very time happens after all that was
                for what, value in due:
                    what.resume(value)
                happened += len(due)
            del every[now]
            if self._aside:
                self._aside.pop(now, None)
        return True
