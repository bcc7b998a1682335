"""Whose turn it is on a lane: children in the order of their start, or in rank 0's order where they have priorities.

[Note: Rank 0's order] A child without a priority begins after all that were started before it, and before all that are
started after it; those with one between two such overtake each other. Ranks are not equally far, and would disagree
about which are there: so rank 0 chooses the most urgent that have been started on it, until their `share`s make one,
and tells the others, on whom they then begin in this order, be they started there yet or not. What is chosen is
overtaken by none. Every rank takes part as soon as it has a child whose turn nobody has told yet; all start the same
children, so each such round has all ranks in it.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from workbench.engine.wire.job import Job

ROOM = 32  # children that are chosen at a time, at most


class Turns:
    """The children of one lane that have not begun; `get` is the lane's thread's. See [Note: Rank 0's order].

    agreed: from what rank 0 has chosen (None elsewhere), ROOM numbers with zeros behind, the same on every rank
    """

    def __init__(self, agreed: Callable[[list[int] | None], list[int]], first: bool) -> None:
        self._agreed, self._first = agreed, first
        self._new: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: dict[int, Job] = {}  # by number, in the order of their start
        self._chosen: deque[int] = deque()
        self._closing = False

    def put(self, job: Job | None) -> None:
        """A child was started; None: no more will be."""
        self._new.put(job)

    def get(self, agreeing: bool = True) -> Job | None:
        """The child whose turn it is, once it is there; None when no more will come.

        agreeing: do ranks still hear each other? Else any order will do
        """
        if not agreeing:
            self._chosen.clear()
        while True:
            self._take_in(wait=False)
            if self._chosen:
                if self._chosen[0] in self._waiting:
                    return self._waiting.pop(self._chosen.popleft())
            elif self._waiting:
                number, job = next(iter(self._waiting.items()))
                if not (job.priority and agreeing):
                    return self._waiting.pop(number)
                said = self._agreed(self._choice() if self._first else None)
                self._chosen.extend(n for n in said if n)
                continue
            if self._closing:
                return None
            self._take_in(wait=True)

    def _take_in(self, wait: bool) -> None:
        try:
            while True:
                job = self._new.get(wait)
                wait = False
                if job is None:
                    self._closing = True
                else:
                    self._waiting[job.number] = job
        except queue.Empty:
            return

    def _choice(self) -> list[int]:
        free: list[Job] = []
        for job in self._waiting.values():
            if not job.priority:
                break
            free.append(job)
        found, share = [0] * ROOM, 0.0
        for at, job in enumerate(sorted(free, key=lambda job: (-job.priority, job.number))[:ROOM]):
            if share >= 1.0:
                break
            found[at] = job.number
            share += job.share
        return found
