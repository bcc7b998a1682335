"""Fault, the base class of faults that the engine performs and the simulator prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.settings import Family


@dataclass(frozen=True, kw_only=True)
class Fault(Family):
    """A fault of one rank, injected on purpose and recorded.

    `stretch` is the factor on the duration of a compute phase on a rank at a step. `choke` is the factor on the time
    that its port is busy. `pause` is how many seconds the rank stalls when the fault begins. `crashes` is whether its
    process ends.
    """

    home: ClassVar[str] = "workbench.fabric"

    def stretch(self, rank: int, step: int, phase: str) -> float:
        return 1.0

    def choke(self, rank: int) -> float:
        return 1.0

    def pause(self, rank: int) -> float:
        return 0.0

    def crashes(self, rank: int) -> bool:
        return False

    def idle(self, is_shaped: bool) -> str | None:
        """Returns why it has no effect on the network, with a remedy; or None."""
        return None
