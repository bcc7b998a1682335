"""The straggler in words: the slow rank, its phase and the waiting ranks."""

from __future__ import annotations

import time
from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import find_straggler, why_silent

SILENT = {
    "nobody": "No rank delays the other ranks.",
    "alone": "A single rank cannot delay other ranks.",
    "alike": "One simulated rank stands for all ranks, so no rank delays another.",
    "stages": "Pipeline stages do different work. See Pipeline for their delays.",
    "early": "The slowest rank appears here a few steps after the start and after each change.",
}
OVER = "Too few steps since the start or the last change to find a slow rank."
UPDATE_INTERVAL = 5.0  # seconds between updates of a verdict's numbers


class Slow(View):
    """One line of text; empty if no rank is slow."""

    name: ClassVar[str] = "straggler"
    title: ClassVar[str] = "Straggler"
    about: ClassVar[str] = "Names the rank that other ranks wait for, its slow phase, and the waiting ranks."
    order: ClassVar[int] = 5
    spoken: ClassVar[bool] = True
    tells: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._looked = self._spoke = 0.0
        self._said: Any = None

    def update(self, run: Any) -> Patch:
        now, soon = time.monotonic(), run.live and time.monotonic() - self._looked < 1.0
        if self._said is not None and (len(run.timeline.spans) == self.cursor or soon):
            return Patch()
        self.cursor, self._looked = len(run.timeline.spans), now
        found = find_straggler(run.timeline)
        why = "" if found else why_silent(run.timeline)
        over = why == "early" and not run.live
        said = (found.rank, found.side, found.phases) if found else (why, over)
        if said == self._said and not (found and now - self._spoke > UPDATE_INTERVAL):
            return Patch()
        self._said, self._spoke = said, now
        text = found.text if found else OVER if over else SILENT[why]
        return Patch(html=f'<p class="wb-verdict{" wb-found" if found else ""}">{escape(text)}</p>')
