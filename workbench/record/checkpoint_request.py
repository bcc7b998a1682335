"""Finds a run's checkpoint, and requests one of a live run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.record.checkpoints import FOLDER, list_checkpoints, name, step_of
from workbench.record.store import RunError

if TYPE_CHECKING:
    from workbench.record.run import Run

POLL_INTERVAL = 0.05  # seconds


def wait_for_checkpoint(run: Run, step: int | None, timeout: float) -> Path:
    """Returns a checkpoint: before `step`, at a live run's next boundary, or at the end.

    Raises RunError if none exists, and TimeoutError after `timeout` seconds.
    """
    there = list_checkpoints(run.path / FOLDER) if run.path else []
    if step is not None:
        if path := next((path for path in there if step_of(path) == step), None):
            return path
        raise RunError(f"step={step}: {run.name} keeps no checkpoint before it; {_those(there)}")
    if run.live and (path := PendingCheckpoint(run).found(timeout)):
        return path
    there, end = list_checkpoints(run.path / FOLDER) if run.path else [], run.made
    if there and there[-1].name == name(end):
        return there[-1]
    raise RunError(f"{run.name} ended after {end} steps without a checkpoint of that step; {_those(there)}")


def _those(there: list[Path]) -> str:
    steps = ", ".join(str(step_of(path)) for path in there)
    return f"give step={steps.rpartition(', ')[2]} (there are {steps})" if there else (
        "set save_every, call lab.checkpoint() while the run is live, or train a Task with keeps=True"
    )  # fmt: skip


class PendingCheckpoint:
    """Requests a checkpoint at a live run's next step boundary. `wait` until it is complete."""

    def __init__(self, run: Run) -> None:
        self._run, self._began = run, run.made
        self._before, self._refused = len(run.details("saved")), len(run.details("not saved"))
        run.keep()

    def wait(self, timeout: float = 60.0) -> Path:
        """Returns the complete checkpoint's directory.

        timeout:  seconds

        Raises RunError if it cannot be made or the run ends first. Raises TimeoutError if it is not complete in time.
        """
        if path := self.found(timeout):
            return path
        raise RunError(f"{self._run.name} is {self._run.state}: it ended before a checkpoint was made")

    def found(self, timeout: float) -> Path | None:
        """Does `wait`, but returns None if the run ends first.

        timeout:  seconds

        Raises RunError if it cannot be made. Raises TimeoutError if it is not complete in time.
        """
        run, until = self._run, time.monotonic() + timeout
        while True:
            over = not run.live
            for number, (_, _, one) in enumerate(run.details("saved")):  # only requested ones surely stay
                if one.get("asked") and (number >= self._before or one["step"] >= self._began):
                    return Path(one["path"])
            if len(told := run.details("not saved")) > self._refused:
                raise RunError(str(told[-1][2].get("text")))
            if over:
                return None
            if time.monotonic() > until:
                raise TimeoutError(f"no checkpoint of {run.name} was complete within {timeout:g} s; the run goes on")
            time.sleep(POLL_INTERVAL)
