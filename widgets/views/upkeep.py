"""The errors of the ranks' clocks and the cost of recording, in words."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._base import Grid, Patch, View
from workbench.analysis import list_clocks, recording_costs
from workbench.analysis.resources.upkeep import describe_upkeep
from workbench.analysis.steps.words import format_seconds


class Upkeep(View):
    """A line of text. Hidden before the first values."""

    name: ClassVar[str] = "upkeep"
    title: ClassVar[str] = "Clocks and recording"
    about: ClassVar[str] = (
        "How far the clocks of ranks on other hosts were off when the run began, with the uncertainty. Also the share "
        "of the ranks' CPU time that recording takes."
    )
    order: ClassVar[int] = 65
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._seen = (-1, -1)
        self._said: str | None = None

    def update(self, run: Any) -> Patch:
        seen = (len(run.timeline.marks), len(run.timeline.samples) // 256)  # ranks record their costs every few seconds
        if run.live and seen == self._seen:
            return Patch()
        self._seen = seen
        text = describe_upkeep(list_clocks(run), recording_costs(run.timeline))
        if text == self._said:
            return Patch()
        self._said = text
        return Patch(html=f'<p class="wb-verdict">{escape(text)}</p>' if text else "")

    def table(self, run: Any) -> Grid:
        cost = {c.rank: c for c in recording_costs(run.timeline)}
        rows = []
        for c in list_clocks(run):
            spent = cost.get(c.rank)
            share = f"{spent.recording / spent.process * 100:.2g} %" if spent else ""
            rows.append(
                (
                    c.rank,
                    c.host,
                    "" if c.offset != c.offset else format_seconds(c.offset),
                    format_seconds(c.error),
                    format_seconds(spent.process) if spent else "",
                    share,
                )
            )
        head = ("rank", "host", "ahead of rank 0", "uncertainty", "CPU time", "for recording")
        return Grid(head, rows, "Clock offsets when the run began; the record's times are corrected by them")
