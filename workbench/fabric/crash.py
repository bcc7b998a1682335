"""Crash: a rank is lost."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.fabric._base import Fault
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Crash(Fault):
    """One rank's process ends without notice, before the step at which the fault begins.

    The other ranks notice it in their next exchange with this rank, and follow `on_death`. If the lab started the
    engine, SIGKILL ends it. Otherwise the rank leaves and its engine stays, so on_death="replace" brings no
    replacement.

    A simulation uses medians of real ranks that were killed on 2 busy cores. The other ranks miss the rank after 0.23
    s. They begin again 0.27 s after the last of them has noticed. With on_death="replace" the replacement is ready 2.0
    s later.

    When to use it: to see which strategies and partitions survive the loss of a rank, its cost and the lost state.
    """

    rank: int = knob(0, 0, 4095, doc="which rank crashes")

    def crashes(self, rank: int) -> bool:
        return rank == self.rank
