"""A command that is told SIGTERM, as a scheduler does some time before it ends a job: its run is kept, and stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.record.checkpoints import FOLDER, found, step_of
from workbench.record.store import RunError

if TYPE_CHECKING:
    from workbench.lab import Lab

PATIENCE = 20.0  # seconds for a checkpoint to be written; schedulers leave 30 before they kill
CODE = 128 + signal.SIGTERM  # with which a process ends that was told so


class Told:
    """Was this process told to end? So often."""

    def __init__(self) -> None:
        self.times = 0
        self.lab: Lab | None = None

    def hear(self, *_: Any) -> None:
        """Between two steps the run keeps a checkpoint and stops. Told twice, or before there is a run, all ends."""
        self.times += 1
        if self.times > 1 or self.lab is None or not self.lab.live:
            raise SystemExit(CODE)
        threading.Thread(target=self._keep, args=(self.lab,), daemon=True).start()  # the main thread may hold any lock

    @staticmethod
    def _keep(lab: Lab) -> None:
        try:
            with suppress(RunError, TimeoutError):  # the run has said why there is none
                lab.checkpoint().wait(PATIENCE)
        finally:
            lab.stop()


def how(out: Path) -> str:
    """What became of a run that was told to end, and how it goes on, in a sentence."""
    kept = found(out / FOLDER)
    if not kept:
        return "told to end (SIGTERM), and no checkpoint is kept"
    return (f"told to end (SIGTERM); a checkpoint before step {step_of(kept[-1])} is kept: go on with workbench run "
            f"--resume {out} --out ...")  # fmt: skip


@contextmanager
def told() -> Iterator[Told]:
    """Listens inside, in the main thread."""
    it = Told()
    before = signal.signal(signal.SIGTERM, it.hear)
    try:
        yield it
    finally:
        signal.signal(signal.SIGTERM, before)
