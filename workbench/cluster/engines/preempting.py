"""An engine that is told SIGTERM: one that trains has its rank leave the run before it ends, any other ends at once.

A lab that ends its engines sends the same signal, and says in its state that it does; so an engine whose lab is over,
or whose kernel is gone, ends at once as well. So does an engine that gets a second SIGTERM after `AGAIN` seconds. An
earlier one belongs to the same notice: Slurm signals each task, and `srun`, which got the signal too, passes it on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cluster.processes.place import Place

if TYPE_CHECKING:
    from workbench.cluster.engines.worker import Bench

AGAIN = 5.0  # seconds within which another SIGTERM is the same notice
LINGER = 1.5  # seconds that the kernel has to hear of a rank that it has left, before its engine ends
END = 2.0  # seconds that the engine has to end in good order after that; a cell may hold its main thread
LOOK = 0.05  # seconds between two looks


class Notice:
    """What one engine does when it is told to end, as long as it has a `bench`."""

    def __init__(self, bench: Bench, place: Path) -> None:
        self.bench, self.place = bench, place
        self._told: float | None = None  # when the first SIGTERM came
        self._left = False  # has the rank left the run?
        self._before: Any = None

    def listen(self) -> None:
        """From now on; on the main thread, for only there a signal is heard. Elsewhere it is as it was."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._heard)

    def forget(self) -> None:
        """SIGTERM is again what it was."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _heard(self, number: int, frame: Any) -> None:
        """The handler. What takes time is done elsewhere, for this thread may hold any lock."""
        now, first = time.monotonic(), self._told is None
        self._told = now if self._told is None else self._told
        if self._left or now - self._told > AGAIN or (first and not self.bench.busy):
            return self._end(number, frame)
        if first:
            threading.Thread(target=self._leave, name="preemption", daemon=True).start()

    def _end(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _leave(self) -> None:
        if not (self.bench.abandoned() or Place(self.place).read().get("ends")):
            try:
                self.bench.session.preempt()
                self.bench.session.join()
            except Exception as error:  # what cannot leave in good order is missed as one that has died
                self.bench.stumbled(error)
            until = time.monotonic() + LINGER
            while not self.bench.told_over and time.monotonic() < until:
                time.sleep(LOOK)
        self._left = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END)
        os._exit(128 + signal.SIGTERM)
