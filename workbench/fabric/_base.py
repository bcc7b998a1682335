"""Faults for teaching, as data: one per file; the engine performs them, the simulator prices them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.settings import Family


@dataclass(frozen=True, kw_only=True)
class Fault(Family):
    """Something wrong with one rank, injected on purpose and recorded.

    `stretch` says how many times longer a phase of compute lasts on a rank at a step; `choke` how many times
    longer its port is busy; `pause` how many seconds it stalls when the fault begins, and `crashes` whether it ends.
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
        """Why it has no effect on a network that is (or is not) emulated, in words that say what would do; or None."""
        return None
