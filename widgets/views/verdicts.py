"""A table that compares two runs by each metric, with 99 % intervals."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import Compared, compare_runs, list_differences

SIGN = {"worse": "▲ worse", "better": "▼ better", "alike": "= alike", "unknown": "? unknown"}
COMPARE_GROWTH = 1.1  # growth of a live run's rows before another comparison


class Verdicts(View):
    """A row per metric: both runs' values, their difference with its interval and a verdict."""

    name: ClassVar[str] = "verdicts"
    title: ClassVar[str] = "Two runs, compared"
    about: ClassVar[str] = (
        "A row per metric: the values of this run and of the other run, and their difference with its 99 % interval. "
        "The verdict on the other run is better, worse or alike. Lower values are better."
    )
    order: ClassVar[int] = 3
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._told = -1.0  # rows at the last comparison

    def update(self, run: Any) -> Patch:
        if run.beside is None:
            first, self._told = self._told < 0, 0.0
            return Patch(html="") if first else Patch()
        rows = len(run.timeline.samples)
        if self._told > 0 and (not run.live or rows < COMPARE_GROWTH * self._told):
            return Patch()
        self._told = max(rows, 1)
        return Patch(html=comparison_html(run, run.beside, compare_runs(run, run.beside)))


def comparison_html(a: Any, b: Any, rows: list[Compared]) -> str:
    """Returns the comparison as HTML."""
    head = "".join(f"<th>{escape(h)}</th>" for h in ("", a.name, b.name, "difference", "99 % interval", f"{b.name} is"))
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _make_cells(row))}</tr>" for row in rows)
    other = "; ".join(list_differences(a, b)) or "no initial setting"
    unknown = "".join(f"<p>{escape(row.metric)} is unknown: {escape(row.why)}.</p>" for row in rows if row.why)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>Lower is better for every metric. The runs differ in: {escape(other)}.</p>{unknown}"
    )


def _make_cells(row: Compared) -> tuple[str, ...]:
    scale, unit, form = {"s": (1e3, " ms", ".5g"), "bytes": (1.0, " bytes", ",.0f")}.get(row.unit, (1.0, "", ".5g"))
    known = row.verdict != "unknown"
    interval = f"[{scale * row.low:+.4g}, {scale * row.high:+.4g}]" if known else ""
    values = [f"{scale * v:{form}}{unit}" if v == v else "" for v in (row.a, row.b)]
    return (row.metric, *values, f"{scale * row.difference:+.4g}" if known else "", interval, SIGN[row.verdict])
