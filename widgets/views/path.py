"""The critical path of the last steps in words."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._base import Grid
from widgets.views._paced import PacedView
from workbench.analysis import critical_path, last_steps
from workbench.analysis.stragglers.path import describe_path, path_shares

LAST_STEPS = 20  # last steps


class Path(PacedView):
    """A line of text. The table lists every part of the mean step's path."""

    name: ClassVar[str] = "path"
    title: ClassVar[str] = "Critical path"
    about: ClassVar[str] = (
        "The chain of work that bounded the last 20 steps, across ranks, computation and collectives. It names the "
        "rank and the phase of each part, and the part's share of the step."
    )
    order: ClassVar[int] = 19
    quiet: ClassVar[bool] = True
    tells: ClassVar[bool] = True

    def compute_result(self, run: Any) -> None:
        self._found = describe_path(critical_path(run.timeline, *last_steps(run.timeline, LAST_STEPS)))

    def result_html(self) -> str:
        return f'<p class="wb-verdict">{escape(self._found)}</p>' if self._found else ""

    def table(self, run: Any) -> Grid:
        parts = path_shares(critical_path(run.timeline, *last_steps(run.timeline, LAST_STEPS)))
        whole = sum(parts.values())
        rows = [("all" if rank < 0 else rank, cause, f"{v * 1e3:.2f}", f"{v / whole * 100:.1f} %")
                for (rank, cause), v in parts.items()]  # fmt: skip
        note = "Critical path of the last 20 steps, their mean"
        return Grid(("rank", "cause", "ms per step", "of the step"), rows, note)
