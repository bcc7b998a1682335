"""Detects that this process or the whole machine stood still.

A thread compares clocks, because a stopped process can only report the stop afterwards. While a machine sleeps, Linux'
monotonic clock stops and its boot-time clock goes on, unlike for a stopped process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

READING_INTERVAL = 0.5  # seconds between 2 readings
MIN_STALL_SECONDS = 3.0  # for a Mark: a busy machine may hold a thread up for 1 s


class ClockReading(NamedTuple):
    """Three clocks read at one moment, in seconds."""

    running: float  # monotonic, without the machine's sleep
    asleep: float  # the machine's sleep so far; 0.0 if the system does not report it
    cpu: float  # used by this process

    @classmethod
    def read_clocks(cls) -> ClockReading:
        running, boot = time.monotonic(), getattr(time, "CLOCK_BOOTTIME", None)
        slept = time.clock_gettime(boot) - running if boot is not None else 0.0
        return cls(running, slept, time.process_time())


def find_clock_gap(before: ClockReading, now: ClockReading, beat: float = READING_INTERVAL) -> dict[str, Any] | None:
    """Returns a Mark's detail if the time between 2 readings is much longer than `beat` seconds, else None.

    seconds: the length of the pause. machine: whether the whole machine slept
    """
    gap, slept = now.running - before.running - beat, now.asleep - before.asleep
    if slept >= MIN_STALL_SECONDS:
        return {"seconds": round(slept, 1), "machine": True, "text": f"this machine slept for {slept:.0f} s"}
    if gap < MIN_STALL_SECONDS:
        return None
    text = f"stood still for {gap:.1f} s: its process was stopped, or got no processor"
    if now.cpu - before.cpu > gap / 2:
        text = f"answered nobody for {gap:.1f} s: its own code held Python's interpreter"
    return {"seconds": round(gap, 1), "machine": False, "text": text}


class StallDetector:
    """Reads the clocks on a thread until `close`. say: gets each Mark's detail; beat: called after each reading"""

    def __init__(
        self, say: Callable[[dict[str, Any]], None], name: str, beat: Callable[[], None] = lambda: None
    ) -> None:
        self._report_stall, self.beat = say, beat
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_beats, name=name, daemon=True)
        self._thread.start()

    def _run_beats(self) -> None:
        before = ClockReading.read_clocks()
        while not self._closing.wait(READING_INTERVAL):
            if found := find_clock_gap(before, ClockReading.read_clocks()):
                self._report_stall(found)
            self.beat()
            before = ClockReading.read_clocks()  # because `beat` may take long

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)
