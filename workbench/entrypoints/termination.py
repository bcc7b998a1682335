"""Handles SIGTERM, by which a scheduler announces a job's end: the run keeps a checkpoint and stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.record.checkpoints import FOLDER, list_checkpoints, step_of
from workbench.record.store import RunError

if TYPE_CHECKING:
    from workbench.lab import Lab

CHECKPOINT_TIMEOUT = 20.0  # seconds for a checkpoint; schedulers allow 30 before SIGKILL
EXIT_CODE = 128 + signal.SIGTERM  # exit code of a process that SIGTERM ended


class Termination:
    """Counts and handles this process's SIGTERMs."""

    def __init__(self) -> None:
        self.times = 0
        self.lab: Lab | None = None

    def handle_signal(self, *_: Any) -> None:
        """Keeps a checkpoint at the next step boundary and stops the run.

        Exits at once on a second SIGTERM, or if no run is live.
        """
        self.times += 1
        if self.times > 1 or self.lab is None or not self.lab.live:
            raise SystemExit(EXIT_CODE)
        stop = threading.Thread(target=self._stop_with_checkpoint, args=(self.lab,), daemon=True)
        stop.start()  # not here, because the main thread may hold any lock

    @staticmethod
    def _stop_with_checkpoint(lab: Lab) -> None:
        try:
            with suppress(RunError, TimeoutError):  # the run reports why none exists
                lab.checkpoint().wait(CHECKPOINT_TIMEOUT)
        finally:
            lab.stop()


def describe_end(out: Path) -> str:
    """Returns how to continue a run that SIGTERM ended."""
    kept = list_checkpoints(out / FOLDER)
    if not kept:
        return "ended by SIGTERM; no checkpoint is kept"
    return (f"ended by SIGTERM; a checkpoint before step {step_of(kept[-1])} is kept: go on with workbench run "
            f"--resume {out} --out ...")  # fmt: skip


@contextmanager
def handle_sigterm() -> Iterator[Termination]:
    """Handles SIGTERM inside the block, on the main thread."""
    it = Termination()
    before = signal.signal(signal.SIGTERM, it.handle_signal)
    try:
        yield it
    finally:
        signal.signal(signal.SIGTERM, before)
