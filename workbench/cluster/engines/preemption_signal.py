"""Handles SIGTERM: a training rank leaves its run first, any other engine ends at once.

An engine also ends at once if its lab is over (a closing lab notes its own SIGTERM in its state) or its kernel is gone.
A second SIGTERM within `SAME_NOTICE` seconds is the same notice: Slurm signals each task, and `srun` passes on its
signal. A later one ends the engine at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from workbench.cluster.processes.lab_place import LabPlace

SAME_NOTICE = 5.0  # seconds
REPORT_WAIT = 1.5  # seconds for the kernel to learn that the rank left
EXIT_TIMEOUT = 2.0  # further seconds for an orderly end; a cell may hold its main thread
POLL_INTERVAL = 0.05  # seconds


class SessionView(Protocol):
    """A rank's session."""

    def preempt(self) -> None:
        """Makes the rank leave its run."""

    def join(self) -> bool:
        """Waits until the rank has left."""


class ServerView(Protocol):
    """An engine. is_end_reported: whether the kernel knows that the session is over"""

    is_end_reported: bool

    @property
    def is_busy(self) -> bool: ...
    @property
    def session(self) -> SessionView: ...

    def is_abandoned(self) -> bool: ...

    def report_rpc_error(self, error: BaseException) -> None: ...


class PreemptionSignal:
    """The handler of SIGTERM of an EngineServer."""

    def __init__(self, server: ServerView, place: Path) -> None:
        self.server, self.place = server, place
        self._notified_at: float | None = None  # when the first SIGTERM came
        self._has_left = False
        self._earlier_handler: Any = None

    def install_handler(self) -> None:
        """Does nothing off the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._earlier_handler = signal.signal(signal.SIGTERM, self._handle_signal)

    def restore_handler(self) -> None:
        if self._earlier_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._earlier_handler)

    def _handle_signal(self, number: int, frame: Any) -> None:
        """Another thread does slow work, because this one may hold any lock."""
        now, first = time.monotonic(), self._notified_at is None
        self._notified_at = now if self._notified_at is None else self._notified_at
        if self._has_left or now - self._notified_at > SAME_NOTICE or (first and not self.server.is_busy):
            return self._end_process(number, frame)
        if first:
            threading.Thread(target=self._leave_run_first, name="preemption", daemon=True).start()

    def _end_process(self, number: int, frame: Any) -> None:
        if callable(self._earlier_handler):
            self._earlier_handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _leave_run_first(self) -> None:
        if not (self.server.is_abandoned() or LabPlace(self.place).read_state().get("ends")):
            try:
                self.server.session.preempt()
                self.server.session.join()
            except Exception as error:  # counts as dead
                self.server.report_rpc_error(error)
            until = time.monotonic() + REPORT_WAIT
            while not self.server.is_end_reported and time.monotonic() < until:
                time.sleep(POLL_INTERVAL)
        self._has_left = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(EXIT_TIMEOUT)
        os._exit(128 + signal.SIGTERM)
