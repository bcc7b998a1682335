"""Requests without effect."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import list_unheeded


class UnmetRequests(View):
    """A line for a pace that the machine cannot keep, and one for each fault without an effect."""

    name: ClassVar[str] = "asked"
    title: ClassVar[str] = "Not as asked"
    about: ClassVar[str] = "Names a pace that the machine cannot keep. Names faults without an effect."
    order: ClassVar[int] = 6
    spoken: ClassVar[bool] = True
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._said: list[str] | None = None

    def update(self, run: Any) -> Patch:
        if self._said is not None and len(run.timeline.marks) == self.cursor:
            return Patch()
        self.cursor = len(run.timeline.marks)
        said = list_unheeded(run.timeline)
        if said == self._said:
            return Patch()
        self._said = said
        return Patch(html="".join(f'<p class="wb-verdict wb-unmet">{escape(text)}</p>' for text in said))
