"""Samples of a rank's CPU seconds."""

from __future__ import annotations

import time

from workbench.engine.collectives.shaping import Clock
from workbench.engine.record.recorder import Recorder

SAMPLE_INTERVAL = 5.0  # seconds


class CpuUsage:
    """Writes "cpu_process" and "cpu_recording": CPU seconds since the previous Sample."""

    def __init__(self, record: Recorder, clock: Clock) -> None:
        self.record, self.clock = record, clock
        self._process, self._recorder, self._last_report = time.process_time(), record.cpu_seconds, clock.now()

    def restart_count(self) -> None:
        """Excludes the set-up."""
        self._process = time.process_time()

    def write_if_due(self, step: int) -> None:
        if self.clock.now() - self._last_report > SAMPLE_INTERVAL:
            self.write_samples(step)

    def write_samples(self, step: int) -> None:
        now, process, recorder = self.clock.now(), time.process_time(), self.record.cpu_seconds
        self.record.sample(step, "cpu_process", now, process - self._process)
        self.record.sample(step, "cpu_recording", now, recorder - self._recorder)
        self._process, self._recorder, self._last_report = process, recorder, now
