"""A lab without ranks for a notebook's cell: all its handles work, and its run is made up."""

from __future__ import annotations

from typing import Any

from tests.unit.synthetic import run as recorded
from tests.unit.test_dashboard import StillLab
from workbench.cluster.turns import Turn
from workbench.run import Run
from workbench.settings import Change


class Still(StillLab):
    """Turns are applied at once; `end` ends the run."""

    def turn(self, path: str, value: Any) -> Turn:
        self.experiment = self.experiment.turn(path, value)
        done = Turn(Change(100, path, value, f"turn {len(self.turns)}"), 100)
        self.turns.append(done)
        return done

    def end(self) -> None:
        if self.run_now:
            self.run_now.live = False
        self.state = "idle"


def still() -> Still:
    """A lab that is training: 220 steps of 4 ranks, with two changes and a slow rank."""
    run: Run = recorded(steps=220, slow=(2, "backward", 1.5), slow_from=160)
    run.live = True
    return Still(run, "running")
