"""The order of children on a lane: by start, or by rank 0's choice if they have priorities.

[Note: Rank 0's order] A child without a priority begins after every child started before it, and before every child
started after it. Between 2 such children, children with priorities may overtake each other. Ranks progress at different
speeds, so they disagree about which children have been started. So rank 0 chooses its most urgent started children,
until their `share`s add up to 1, and broadcasts the choice. Every rank begins them in this order, even if it must wait
for their start. No child overtakes them. A rank joins a round once it has a child with a priority that no round has
chosen. All ranks start the same children, so all join each round.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from workbench.engine.collectives.child_job import ChildJob

MAX_CHOSEN = 32  # children that rank 0 chooses at a time, at most


class ChildQueue:
    """The children of one lane that have not begun. Only the lane's thread calls `next_job`.

    agreed: broadcasts rank 0's choice (None on other ranks): MAX_CHOSEN numbers of children, padded with zeros
    """

    def __init__(self, agreed: Callable[[list[int] | None], list[int]], first: bool) -> None:
        self._broadcast_choice, self._first = agreed, first
        self._new: queue.SimpleQueue[ChildJob | None] = queue.SimpleQueue()
        self._waiting: dict[int, ChildJob] = {}  # by number, in the order of their start
        self._chosen: deque[int] = deque()
        self._closing = False

    def add_job(self, job: ChildJob | None) -> None:
        """None: no more will come"""
        self._new.put(job)

    def next_job(self, agreeing: bool = True) -> ChildJob | None:
        """Waits for the next child and returns it, or None after the last.

        agreeing: whether ranks can still exchange their choice; if not, any order will do
        """
        if not agreeing:
            self._chosen.clear()
        while True:
            self._receive_jobs(wait=False)
            if self._chosen:
                if self._chosen[0] in self._waiting:
                    return self._waiting.pop(self._chosen.popleft())
            elif self._waiting:
                number, job = next(iter(self._waiting.items()))
                if not (job.priority and agreeing):
                    return self._waiting.pop(number)
                said = self._broadcast_choice(self._choose_children() if self._first else None)
                self._chosen.extend(n for n in said if n)
                continue
            if self._closing:
                return None
            self._receive_jobs(wait=True)

    def _receive_jobs(self, wait: bool) -> None:
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

    def _choose_children(self) -> list[int]:
        free: list[ChildJob] = []
        for job in self._waiting.values():
            if not job.priority:
                break
            free.append(job)
        found, share = [0] * MAX_CHOSEN, 0.0
        for at, job in enumerate(sorted(free, key=lambda job: (-job.priority, job.number))[:MAX_CHOSEN]):
            if share >= 1.0:
                break
            found[at] = job.number
            share += job.share
        return found
