"""Handles SIGTERM: a training rank leaves its run first, any other engine ends at once.

An engine also ends at once if its lab is over (a closing lab notes its own SIGTERM in its state) or its kernel is gone.
A second SIGTERM within `AGAIN` seconds is the same notice: Slurm signals each task, and `srun` passes on its signal. A
later one ends the engine at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from workbench.cluster.processes.place import LabPlace

AGAIN = 5.0  # seconds within which a second SIGTERM is the same notice
LINGER = 1.5  # seconds for the kernel to learn that the rank left
END = 2.0  # further seconds for an orderly end; a cell may hold its main thread
LOOK = 0.05  # seconds between two looks


class SessionView(Protocol):
    """The session of a rank, as its preemption sees it."""

    def preempt(self) -> None:
        """Makes the rank leave its run."""

    def join(self) -> bool:
        """Waits until the rank has left."""


class ServerView(Protocol):
    """An engine, as its handler of SIGTERM sees it. told_over: whether the kernel knows that the session is over"""

    told_over: bool

    @property
    def is_busy(self) -> bool: ...
    @property
    def session(self) -> SessionView: ...

    def is_abandoned(self) -> bool:
        """Whether the lab's kernel is gone without having detached."""

    def report_error(self, error: BaseException) -> None:
        """Reports an error of the engine."""


class PreemptionSignal:
    """A `bench`'s handler of SIGTERM."""

    def __init__(self, bench: ServerView, place: Path) -> None:
        self.bench, self.place = bench, place
        self._told: float | None = None  # when the first SIGTERM came
        self._left = False
        self._before: Any = None

    def install_handler(self) -> None:
        """Does nothing off the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle_signal)

    def restore_handler(self) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _handle_signal(self, number: int, frame: Any) -> None:
        """Uses another thread for slow work, because this one may hold any lock."""
        now, first = time.monotonic(), self._told is None
        self._told = now if self._told is None else self._told
        if self._left or now - self._told > AGAIN or (first and not self.bench.is_busy):
            return self._end_process(number, frame)
        if first:
            threading.Thread(target=self._leave_run, name="preemption", daemon=True).start()

    def _end_process(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _leave_run(self) -> None:
        if not (self.bench.is_abandoned() or LabPlace(self.place).read_state().get("ends")):
            try:
                self.bench.session.preempt()
                self.bench.session.join()
            except Exception as error:  # counts as dead
                self.bench.report_error(error)
            until = time.monotonic() + LINGER
            while not self.bench.told_over and time.monotonic() < until:
                time.sleep(LOOK)
        self._left = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END)
        os._exit(128 + signal.SIGTERM)
