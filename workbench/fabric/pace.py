"""What a pace and a fault make of a phase of compute, and whether the pace is kept: one rule for both hosts.

A rank that computes for `computed` seconds, asked to take `asked`, takes max(asked, computed), times its faults. So a
fault multiplies what the rank would have taken without it, on a machine that cannot keep the pace, too.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

SHARES = {"forward": 0.3, "backward": 0.6, "update": 0.1}  # of a step's compute, where `pace` states it
LATE = 1.2  # times what was asked for: from here on a pace is not met
AGAIN = 1.25  # times what was said last: from here on it is said anew


def lasts(asked: float, computed: float, factor: float = 1.0) -> float:
    """Seconds that a phase lasts which was to take `asked` and computes for `computed`, stretched by `factor`.

    >>> lasts(0.1, 0.25, 2.0)
    0.5
    """
    return max(asked, computed) * factor


class Kept:
    """Whether one rank keeps its pace: told what each step took, it says in words when that changes.

    It looks at the middle of the last `STEPS` steps, so that one slow step is not news.
    """

    STEPS = 5

    def __init__(self) -> None:
        self._pace = 0.0
        self._last: deque[float] = deque(maxlen=self.STEPS)  # took / asked
        self._said = 0.0  # seconds that compute was last said to take; 0: nothing to withdraw
        self._is_same = True  # was that said of this pace?

    def step(self, pace: float, asked: float, took: float) -> dict[str, Any] | None:
        """A step is over at a pace of `pace` seconds, 0 for none; what there is to say, else None.

        asked: seconds that its phases were to take. took: seconds that they took, without what faults added.
        """
        if pace != self._pace:
            self._pace, self._is_same = pace, False
            self._last.clear()
        if not pace:
            return self._withdrawn("no pace is asked for")
        if asked:
            self._last.append(took / asked)
        if len(self._last) < self.STEPS:
            return None
        if not self._said and max(self._last) <= LATE:  # nor is then the middle late, and nothing to withdraw
            return None
        middle = median(self._last)
        takes = asked * middle
        known = self._said if self._is_same else 0.0
        if middle <= ((1 + LATE) / 2 if known else LATE):
            return self._withdrawn("the pace is met")
        if not asked or known / AGAIN < takes < known * AGAIN:
            return None
        self._said, self._is_same = takes, True
        text = f"pace not met: compute takes {takes * 1e3:.3g} ms, the pace asks for {asked * 1e3:.3g} ms"
        return {"met": False, "takes_ms": takes * 1e3, "asked_ms": asked * 1e3, "text": text}

    def _withdrawn(self, why: str) -> dict[str, Any] | None:
        if not self._said:
            return None
        self._said = 0.0
        return {"met": True, "text": why}
