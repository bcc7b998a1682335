"""The duration of a compute phase under a pace and faults, and whether a rank keeps its pace.

A rank that computes for `computed` seconds under a pace of `asked` takes the larger time, times its faults. So a fault
also acts on a machine that cannot keep the pace.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

SHARES = {"forward": 0.3, "backward": 0.6, "update": 0.1}  # of a step's compute under a `pace`
LATE_FACTOR = 1.2  # times the pace's time: beyond this a pace is not met
REPORT_FACTOR = 1.25  # times the last reported value, for another report


def lasts(asked: float, computed: float, factor: float = 1.0) -> float:
    """Returns the duration of a phase: the longer of `asked` and `computed`, times `factor`.

    >>> lasts(0.1, 0.25, 2.0)
    0.5
    """
    return max(asked, computed) * factor


class Kept:
    """Tracks whether one rank keeps its pace, and reports changes.

    It uses the median of the last `STEPS` steps, to ignore a single slow one.
    """

    STEPS = 5

    def __init__(self) -> None:
        self._pace = 0.0
        self._last: deque[float] = deque(maxlen=self.STEPS)  # took / asked
        self._said = 0.0  # compute seconds of the last report; 0: none to withdraw
        self._is_same = True  # whether it was about this pace

    def step(self, pace: float, asked: float, took: float) -> dict[str, Any] | None:
        """Takes the times of a finished step at `pace` seconds (0 for none); returns a report or None.

        asked: seconds that its phases should take. took: seconds that they took, without the effect of faults.
        """
        if pace != self._pace:
            self._pace, self._is_same = pace, False
            self._last.clear()
        if not pace:
            return self._withdrawn("no pace is set")
        if asked:
            self._last.append(took / asked)
        if len(self._last) < self.STEPS:
            return None
        if not self._said and max(self._last) <= LATE_FACTOR:  # then the median is not late either
            return None
        middle = median(self._last)
        takes = asked * middle
        known = self._said if self._is_same else 0.0
        if middle <= ((1 + LATE_FACTOR) / 2 if known else LATE_FACTOR):
            return self._withdrawn("the pace is met")
        if not asked or known / REPORT_FACTOR < takes < known * REPORT_FACTOR:
            return None
        self._said, self._is_same = takes, True
        text = f"pace not met: compute takes {takes * 1e3:.3g} ms, the pace asks for {asked * 1e3:.3g} ms"
        return {"met": False, "takes_ms": takes * 1e3, "asked_ms": asked * 1e3, "text": text}

    def _withdrawn(self, why: str) -> dict[str, Any] | None:
        if not self._said:
            return None
        self._said = 0.0
        return {"met": True, "text": why}
