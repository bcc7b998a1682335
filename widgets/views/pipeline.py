"""How a pipeline spends its time. Hidden without a pipeline."""

from __future__ import annotations

import time
from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import measure_bubble

UPDATE_INTERVAL = 3.0  # seconds between updates


class Pipeline(View):
    """A line on the stages' idle time: the unavoidable part, and the stage or rank that adds to it."""

    name: ClassVar[str] = "pipeline"
    title: ClassVar[str] = "Pipeline"
    about: ClassVar[str] = "How long the stages are idle (the bubble), and the share due to filling and draining."
    order: ClassVar[int] = 7
    spoken: ClassVar[bool] = True
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._looked = 0.0
        self._said: str | None = None

    def update(self, run: Any) -> Patch:
        now = time.monotonic()
        soon = run.live and now - self._looked < UPDATE_INTERVAL
        if self._said is not None and (len(run.timeline.spans) == self.cursor or soon):
            return Patch()
        self.cursor, self._looked = len(run.timeline.spans), now
        found = measure_bubble(run.timeline)
        said = found.text if found else ""
        if said == self._said:
            return Patch()
        self._said = said
        return Patch(html=f'<p class="wb-verdict">{escape(said)}</p>' if said else "")
