"""What a rank's process and its recorder cost, in CPU seconds, into the record while the run goes on."""

from __future__ import annotations

import time

from workbench.engine.record.recorder import Recorder
from workbench.engine.wire.shaping import Clock

EVERY = 5.0  # seconds from one word to the next


class Cost:
    """One rank's: Samples "cpu_process" and "cpu_recording", each what came since the one before."""

    def __init__(self, record: Recorder, clock: Clock) -> None:
        self.record, self.clock = record, clock
        self._process, self._recorder, self._told = time.process_time(), record.cpu_seconds, clock.now()

    def begin(self) -> None:
        """Counts from here on: what came before was setting up."""
        self._process = time.process_time()

    def due(self, step: int) -> None:
        """Says it, if it has not been said for a while."""
        if self.clock.now() - self._told > EVERY:
            self.tell(step)

    def tell(self, step: int) -> None:
        now, process, recorder = self.clock.now(), time.process_time(), self.record.cpu_seconds
        self.record.sample(step, "cpu_process", now, process - self._process)
        self.record.sample(step, "cpu_recording", now, recorder - self._recorder)
        self._process, self._recorder, self._told = process, recorder, now
