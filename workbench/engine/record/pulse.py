"""A rank's pulse: notices that this process, or the whole machine, stood still, and writes it into the record.

A process that was stopped cannot say so while it is; a thread that looks at the clocks can afterwards. Linux' monotonic
clock does not count while a machine sleeps and the boot-time clock does: so a sleep is told from a stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

BEAT = 0.5  # seconds between two looks
LEAST = 3.0  # seconds without a look that are worth a Mark: a busy machine may well hold a thread up for one


class Clocks(NamedTuple):
    """Three clocks read at one moment, in seconds."""

    running: float  # not while the machine sleeps
    asleep: float  # that the machine has slept so far; 0.0 where that cannot be read
    cpu: float  # that this process has used

    @classmethod
    def read(cls) -> Clocks:
        running, boot = time.monotonic(), getattr(time, "CLOCK_BOOTTIME", None)
        slept = time.clock_gettime(boot) - running if boot is not None else 0.0
        return cls(running, slept, time.process_time())


def stood_still(before: Clocks, now: Clocks, beat: float = BEAT) -> dict[str, Any] | None:
    """What to say of the time between two looks that should lie `beat` seconds apart; None for nothing.

    seconds: how long nothing was seen; machine: whether the whole machine slept
    """
    gap, slept = now.running - before.running - beat, now.asleep - before.asleep
    if slept >= LEAST:
        return {"seconds": round(slept, 1), "machine": True, "text": f"this machine slept for {slept:.0f} s"}
    if gap < LEAST:
        return None
    text = f"stood still for {gap:.1f} s: its process was stopped, or got no processor"
    if now.cpu - before.cpu > gap / 2:
        text = f"answered nobody for {gap:.1f} s: its own code held Python's interpreter"
    return {"seconds": round(gap, 1), "machine": False, "text": text}


class Pulse:
    """Looks at the clocks on a thread of its own until it is closed; `say` is told what was noticed.

    beat: called at each look
    """

    def __init__(
        self, say: Callable[[dict[str, Any]], None], name: str, beat: Callable[[], None] = lambda: None
    ) -> None:
        self._say, self.beat = say, beat
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=name, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        before = Clocks.read()
        while not self._closing.wait(BEAT):
            if found := stood_still(before, Clocks.read()):
                self._say(found)
            self.beat()
            before = Clocks.read()  # for a beat may take its time

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)
