"""The straggler line: which rank is slow, and whether it is cause or victim, in words."""

from __future__ import annotations

import time
from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import last_steps, straggler

QUIET = "No rank holds the others up."
EARLY = "Which rank holds the others up is said here after a few steps."
AGAIN = 5.0  # seconds before the same verdict is said anew with its present numbers


class Slow(View):
    """One line of text; silent while nobody is slow."""

    name: ClassVar[str] = "straggler"
    title: ClassVar[str] = "Straggler"
    about: ClassVar[str] = "Names the rank that the others wait for, what it is slow at, and who waits."
    order: ClassVar[int] = 5
    spoken: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._looked = self._spoke = 0.0
        self._said: Any = None

    def update(self, run: Any) -> Patch:
        now, soon = time.monotonic(), run.live and time.monotonic() - self._looked < 1.0
        if self._said is not None and (len(run.timeline.spans) == self.cursor or soon):
            return Patch()
        self.cursor, self._looked = len(run.timeline.spans), now
        found = straggler(run.timeline)
        early = last_steps(run.timeline)[1] < 6
        said = (found.rank, found.side, found.phase) if found else ("early",) if early else ("quiet",)
        if said == self._said and not (found and now - self._spoke > AGAIN):
            return Patch()
        self._said, self._spoke = said, now
        text = found.text if found else EARLY if early else QUIET
        return Patch(html=f'<p class="wb-verdict{" wb-found" if found else ""}">{escape(text)}</p>')
