"""Freeze: a rank stalls once."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.fabric._base import Fault
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Freeze(Fault):
    """One rank stalls once, at the step at which the fault begins.

    When to use it: to see which ranks wait for a rank that stalls, and which strategies continue without it.
    """

    rank: int = knob(0, 0, 4095, doc="which rank freezes")
    seconds: float = knob(2.0, 0.0, 60.0, unit="s", doc="for how long")

    def idle(self, is_shaped: bool) -> str | None:
        return "0 s is no pause; use a longer time" if self.seconds == 0.0 else None

    def pause(self, rank: int) -> float:
        return self.seconds if rank == self.rank else 0.0
