"""A forward or backward that is handed out bucket by bucket."""

from __future__ import annotations


class Pass:
    """A forward or backward under way that is handed out bucket by bucket; each piece is computed when it is asked for.

    began: when it would have begun had it never been interrupted; since: when its present stretch did
    last:  when the pieces asked for so far are computed
    """

    __slots__ = ("began", "last", "next", "phase", "seconds", "shares", "since")

    def __init__(self, phase: str, began: float, seconds: float, shares: list[float]) -> None:
        self.phase, self.seconds, self.shares = phase, seconds, shares
        self.began = self.since = self.last = began
        self.next = 0
