"""A pass that a strategy gets bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any


class BucketPass:
    """A forward or backward under way, computed piece by piece at the strategy's requests.

    began:  when it would have begun without interruptions; since: when its present stretch began
    last:   when the pieces requested so far are computed
    events: the remaining ones, if parameters are sharded or sliced; otherwise None
    then:   for one micro-batch's pass: the batch's fiber, which continues after it, and the fiber's answer
    """

    __slots__ = ("began", "events", "last", "next", "phase", "seconds", "shares", "since", "then")

    def __init__(self, phase: str, began: float, seconds: float, shares: list[float]) -> None:
        self.phase, self.seconds, self.shares = phase, seconds, shares
        self.began = self.since = self.last = began
        self.next = 0
        self.events: deque[Any] | None = None
        self.then: tuple[Any, Any] | None = None

    def follow_events(self, events: Iterable[Any]) -> None:
        """Lets these events determine when buckets are full."""
        self.events = deque(events)

    def continue_after(self, fiber: Any, answer: Any) -> None:
        """Lets `fiber` continue after this pass."""
        self.then = fiber, answer

    def take_next(self) -> int:
        """Returns the number of the next bucket, and counts it."""
        self.next += 1
        return self.next - 1

    def pause_until(self, t: float) -> None:
        """Continues this pass at time `t`, after a pause since its last piece."""
        self.began += t - self.last
        self.since = t

    def compute_until(self, share: float, delay: float) -> float:
        """Computes up to a share of the pass, and returns when that is done. delay: extra seconds"""
        self.began += delay
        self.last = self.began + self.seconds * share
        return self.last
