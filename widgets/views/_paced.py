"""A text that takes long to find: of a live run it is found anew now and then, the more seldom the longer it takes."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from widgets.views._base import Patch, View

PAUSE = 2.0  # seconds between two looks at a live run, at least
SHARE = 0.03  # of the time at most is spent on looking


class Paced(View):
    """Looks when it is due, and hands out its text where that is another."""

    def __init__(self) -> None:
        super().__init__()
        self._at, self._pause = 0.0, PAUSE
        self._said: str | None = None

    @abstractmethod
    def look(self, run: Any) -> None:
        """Finds what there is to say now."""

    @abstractmethod
    def html(self) -> str:
        """What there is to say, as it was found last; "" where there is nothing."""

    def update(self, run: Any) -> Patch:
        now, spans = time.monotonic(), len(run.timeline.spans)
        if self._said is None or (spans != self.cursor and (not run.live or now - self._at >= self._pause)):
            self.look(run)
            self.cursor, self._at = spans, time.monotonic()
            self._pause = max(PAUSE, (self._at - now) / SHARE)
        html = self.html()
        if html == self._said:
            return Patch()
        self._said = html
        return Patch(html=html)
