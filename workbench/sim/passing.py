"""A forward or backward that is handed out bucket by bucket, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.sim.fiber import END, Fiber

if TYPE_CHECKING:
    from workbench.sim.host import Host


class Pass:
    """A pass under way.

    began, seconds: when it began, put off by as much as the strategy stood in its way, and how long it lasts
    shares: by bucket in the order of the pass, the share of it after (forward: before) which it is handed out
    next, last: the bucket that is next, and when the one before it was handed out
    """

    __slots__ = ("about", "began", "last", "next", "phase", "seconds", "shares")

    def __init__(self, phase: str, began: float, seconds: float, shares: list[float], about: Any = None) -> None:
        self.phase, self.began, self.seconds, self.shares, self.about = phase, began, seconds, shares, about
        self.next = 0
        self.last = began


class Ended:
    """The end of a pass's time, at which its loop is left."""

    __slots__ = ("fiber", "host")

    def __init__(self, host: Host, fiber: Fiber) -> None:
        self.host, self.fiber = host, fiber

    def resume(self, _: Any) -> None:
        passing, self.fiber.passing = self.fiber.passing, None
        self.host.span("compute", passing.phase, passing.began, passing.began, self.host.clock.now, 0)
        self.fiber.resume(END)


