"""A lab without ranks for a notebook's cell: all its controls work, and its run is synthetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.unit.synthetic import run as recorded
from tests.unit.test_dashboard import StillLab
from workbench.cluster.run.run_changes import PendingChange
from workbench.run import Run
from workbench.settings import Change


class Still(StillLab):
    """Applies changes at once; `end` ends the run."""

    name = "still"

    def set(self, path: str, value: Any) -> PendingChange:
        self.experiment = self.experiment.set(path, value)
        done = PendingChange(Change(100, path, value, f"change {len(self.changes)}"), 100)
        self.changes.append(done)
        return done

    def hang(self, what: str = "rank 2 has been in forward of step 41 for 12 s; 0, 1, 3 wait in all_reduce") -> None:
        """Reports a hang with the text `what`; "" ends it."""
        self.notes[:] = [what] if what else []
        if self.run_now:
            self.run_now._control = SimpleNamespace(holdup=what, standing=[])  # type: ignore[assignment]

    def end(self) -> None:
        if self.run_now:
            self.run_now.live = False
        self.state = "idle"


def still() -> Still:
    """Returns a training lab: 220 steps of 4 ranks, with two changes and a slow rank."""
    run: Run = recorded(steps=220, slow=(2, "backward", 1.5), slow_from=160)
    run.live = True
    return Still(run, "running")
