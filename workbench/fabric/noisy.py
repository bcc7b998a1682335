"""Noisy: the speed of ranks varies from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from workbench.fabric._base import Fault
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Noisy(Fault):
    """Each rank's compute gets its own random factor in each step, uniform from 1 to 1 + spread.

    When to use it: to see the cost of small differences between equal machines, if all ranks wait for the slowest.
    """

    spread: float = knob(0.3, 0.0, 5.0, doc="largest extra share of a phase's time")
    seed: int = knob(0, 0, 2**31 - 1, doc="seed of the factors, so that a run can be repeated")

    def idle(self, is_shaped: bool) -> str | None:
        return "with spread 0 all phases are the same; use a spread above 0" if self.spread == 0.0 else None

    def stretch(self, rank: int, step: int, phase: str) -> float:
        return 1.0 + self.spread * Random(f"{self.seed}/{rank}/{step}/{phase}").random()
