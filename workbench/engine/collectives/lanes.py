"""All lanes of one rank, by name. The first also runs ops outside of children; other lanes open at first use."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from workbench.engine.collectives.lane import Lane
from workbench.rank import Handle, Op


class Lanes:
    """used_other_lane: whether a child of this step used another lane than the first"""

    def __init__(self, first: Lane, open: Callable[[str], Lane]) -> None:
        self.first, self.open = first, open
        self._lanes = {first.name: first}
        self.used_other_lane = False

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def begin_step(self) -> None:
        self.used_other_lane = False

    @property
    def current_collective(self) -> str:
        return next((lane.current_collective for lane in self if lane.current_collective), "")

    @property
    def sent_bytes(self) -> int:
        return sum(lane.sent for lane in self)

    def start(self, child: Coroutine[Op, Any, Any], name: str, lane: str, priority: int = 0,
              share: float = 1.0) -> Handle:  # fmt: skip
        if lane == self.first.name:
            return self.first.start(child, name, priority, share)
        if lane not in self._lanes:
            self._lanes[lane] = self.open(lane)
        self.used_other_lane = self.used_other_lane or not self._lanes[lane].wireless
        self._lanes[lane].enter_step(self.first.step)
        return self._lanes[lane].start(child, name, priority, share)

    def wait(self, handle: Handle) -> Any:
        return self._lanes[handle.lane].wait(handle)

    def close(self) -> None:
        for lane in self:
            lane.close()
