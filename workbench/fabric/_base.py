"""Fault, the base class of faults that the engine performs and the simulator prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.settings import Family


@dataclass(frozen=True, kw_only=True)
class Fault(Family):
    """A fault of one rank, injected on purpose and recorded. The defaults are those of a healthy rank.

    rank:       a rank's number in the run
    step:       the step, from 0
    phase:      "forward", "backward" or "update"
    is_shaped:  whether the network limits bandwidth or adds latency
    """

    home: ClassVar[str] = "workbench.fabric"

    def stretch(self, rank: int, step: int, phase: str) -> float:
        """Returns the factor on the duration of a compute phase of this rank."""
        return 1.0

    def choke(self, rank: int) -> float:
        """Returns the factor on the time for which the rank's port is busy."""
        return 1.0

    def pause(self, rank: int) -> float:
        """Returns the seconds for which the rank stalls when the fault begins."""
        return 0.0

    def crashes(self, rank: int) -> bool:
        """Whether the rank's process ends."""
        return False

    def idle(self, is_shaped: bool) -> str | None:
        """Returns why it has no effect on the network, with a remedy; or None."""
        return None
