"""Handles SIGTERM: a rank that trains leaves its run first, any other engine ends at once.

A lab that ends its engines sends the same signal and writes that into its state. So an engine also ends at once if its
lab is over or its kernel is gone. A second SIGTERM ends it at once, too, if it comes more than `AGAIN` seconds later.
Before that it belongs to the same notice: Slurm signals each task, and `srun` passes on the signal that it gets.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cluster.processes.place import LabPlace

if TYPE_CHECKING:
    from workbench.cluster.engines.engine_server import EngineServer

AGAIN = 5.0  # seconds within which a second SIGTERM is the same notice
LINGER = 1.5  # seconds for the kernel to learn that the rank has left, before its engine ends
END = 2.0  # seconds for the engine to end in order after that; a cell may hold its main thread
LOOK = 0.05  # seconds between two looks


class PreemptionSignal:
    """An engine's handler of SIGTERM, as long as it has a `bench`."""

    def __init__(self, bench: EngineServer, place: Path) -> None:
        self.bench, self.place = bench, place
        self._told: float | None = None  # when the first SIGTERM came
        self._left = False  # whether the rank has left the run
        self._before: Any = None

    def install_handler(self) -> None:
        """Installs the handler on the main thread. On another thread it cannot, and does nothing."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle_signal)

    def restore_handler(self) -> None:
        """Restores the handler that was there before."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _handle_signal(self, number: int, frame: Any) -> None:
        """The handler. Slow work runs on another thread, because this thread may hold any lock."""
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
            except Exception as error:  # a rank that cannot leave in order counts as dead
                self.bench.report_error(error)
            until = time.monotonic() + LINGER
            while not self.bench.told_over and time.monotonic() < until:
                time.sleep(LOOK)
        self._left = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END)
        os._exit(128 + signal.SIGTERM)
