"""A forward or backward that is handed out bucket by bucket."""

from __future__ import annotations

from collections import deque
from typing import Any


class Pass:
    """A forward or backward under way that is handed out bucket by bucket; each piece is computed when it is asked for.

    began: when it would have begun had it never been interrupted; since: when its present stretch did
    last:  when the pieces asked for so far are computed
    events: what is still to come, where parameters lie in shards or slices; else None
    then:   who goes on once it is over, and with what: the batch of which it is one micro-batch's
    """

    __slots__ = ("began", "events", "last", "next", "phase", "seconds", "shares", "since", "then")

    def __init__(self, phase: str, began: float, seconds: float, shares: list[float]) -> None:
        self.phase, self.seconds, self.shares = phase, seconds, shares
        self.began = self.since = self.last = began
        self.next = 0
        self.events: deque[Any] | None = None
        self.then: tuple[Any, Any] | None = None
