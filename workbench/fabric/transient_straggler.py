"""TransientStraggler: ranks are slow in random steps."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from workbench.fabric._base import Fault
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class TransientStraggler(Fault):
    """In random steps a rank is slow for 1 step. Each rank has its own, repeatable draws.

    With `probability` = 0.1 and `factor` = 5 a rank computes 5 times as long in 10 % of its steps. Over many steps all
    ranks are equally fast, unlike under `Slow`.

    When to use it: for machines on which every rank is sometimes slow and none always. BackupWorkers and
    BoundedStaleness suit this.
    """

    formerly_called: ClassVar[tuple[str, ...]] = ("Stumble",)

    probability: float = knob(0.1, 0.0, 1.0, doc="share of slow steps of a rank")
    factor: float = knob(5.0, 1.0, 100.0, doc="factor on the compute time of a slow step")
    rank: int = knob(-1, -1, 4095, doc="the rank that has slow steps; -1: every rank, each at its own steps")
    seed: int = knob(0, 0, 2**31 - 1, doc="seed of the draws, so that a run can be repeated")

    def idle(self, is_shaped: bool) -> str | None:
        never = self.probability == 0.0 or self.factor == 1.0
        return "with probability 0 or factor 1 no step is slow; use larger values" if never else None

    def stretch(self, rank: int, step: int, phase: str) -> float:
        if self.rank not in (-1, rank):
            return 1.0
        # the old name stays in the seed, so that recorded runs repeat
        return self.factor if Random(f"stumble {self.seed}/{rank}/{step}").random() < self.probability else 1.0
