"""A text that a live run updates less often if computing it takes longer."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from widgets.views._base import Patch, View

MIN_INTERVAL = 2.0  # seconds, at least, between two computations of a live run
MAX_TIME_SHARE = 0.03  # largest share of time for computing


class PacedView(View):
    """Computes its text when due. Sends only a changed text."""

    def __init__(self) -> None:
        super().__init__()
        self._at, self._pause = 0.0, MIN_INTERVAL
        self._said: str | None = None

    @abstractmethod
    def compute_result(self, run: Any) -> None:
        """Computes the present result."""

    @abstractmethod
    def result_html(self) -> str:
        """Returns the last result as HTML, or ""."""

    def update(self, run: Any) -> Patch:
        now, spans = time.monotonic(), len(run.timeline.spans)
        if self._said is None or (spans != self.cursor and (not run.live or now - self._at >= self._pause)):
            self.compute_result(run)
            self.cursor, self._at = spans, time.monotonic()
            self._pause = max(MIN_INTERVAL, (self._at - now) / MAX_TIME_SHARE)
        html = self.result_html()
        if html == self._said:
            return Patch()
        self._said = html
        return Patch(html=html)
