"""A command that is told SIGTERM, as a scheduler does some time before it ends a job: its run is kept, and stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.lab import Lab

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
            lab.checkpoint()
        finally:
            lab.stop()


@contextmanager
def told() -> Iterator[Told]:
    """Listens inside, in the main thread."""
    it = Told()
    before = signal.signal(signal.SIGTERM, it.hear)
    try:
        yield it
    finally:
        signal.signal(signal.SIGTERM, before)
