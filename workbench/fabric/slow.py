"""Slow: a constantly slow rank."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.fabric._base import Fault
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Slow(Fault):
    """One rank is slower than the other ranks by a constant factor, in one phase or in all compute.

    When to use it: to tell the cause of a delay from its victims and to compare strategies on uneven machines. A
    strategy that waits for every rank in each step runs at this rank's speed.
    """

    rank: int = knob(0, 0, 4095, doc="which rank is slow")
    factor: float = knob(2.0, 1.0, 20.0, doc="factor on the duration of the phase")
    phase: str = knob("compute", choices=("compute", "forward", "backward", "link"), doc="the slow phase")

    def stretch(self, rank: int, step: int, phase: str) -> float:
        return self.factor if rank == self.rank and self.phase in (phase, "compute") else 1.0

    def idle(self, is_shaped: bool) -> str | None:
        if self.factor == 1.0:
            return "a factor of 1 slows nothing; use a factor above 1"
        if self.phase == "link" and not is_shaped:
            return "there is no emulated network with a port to slow; set a bandwidth or a latency"
        return None

    def choke(self, rank: int) -> float:
        return self.factor if rank == self.rank and self.phase == "link" else 1.0
