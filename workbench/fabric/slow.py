"""A slow rank."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.fabric._base import Fault
from workbench.knobs import knob


@dataclass(frozen=True, kw_only=True)
class Slow(Fault):
    """One rank is slower than the others by a constant factor, in one phase or in all compute."""

    rank: int = knob(0, 0, 4095, doc="which rank is slow")
    factor: float = knob(2.0, 1.0, 20.0, doc="how many times longer the phase lasts")
    phase: str = knob("compute", choices=("compute", "forward", "backward", "link"), doc="what is slow")

    def stretch(self, rank: int, step: int, phase: str) -> float:
        return self.factor if rank == self.rank and self.phase in (phase, "compute") else 1.0

    def choke(self, rank: int) -> float:
        return self.factor if rank == self.rank and self.phase == "link" else 1.0
