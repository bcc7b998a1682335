"""A rank that is lost."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.fabric._base import Fault
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Crash(Fault):
    """One rank's process ends without a word, before the step at which the fault begins.

    `on_death` says what the others do, who notice it when they next exchange something with that rank. The engine is
    ended by SIGKILL where the lab has started it; elsewhere only the rank leaves, its engine lives, and with
    on_death="replace" nobody comes for it. In a simulation it is missed 0.23 s later, the others have begun again
    0.27 s after the last of them has noticed, and with on_death="replace" others are there 2.0 s after that: medians
    of real ranks that were killed on two busy cores.

    When to use it: to see which strategies and partitions outlive a rank, what that costs, and what is lost with it.
    """

    rank: int = knob(0, 0, 4095, doc="which rank crashes")

    def crashes(self, rank: int) -> bool:
        return rank == self.rank
