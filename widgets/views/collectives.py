"""Every collective by operation, group and bucket: count, size, speed and waiting."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._paced import PacedView
from workbench.analysis import ByCollective, by_collective, format_bytes, last_steps
from workbench.analysis.steps.words import format_seconds

LAST_STEPS = 20  # last steps
MAX_ROWS = 16  # rows, at most: the most expensive ones
HEAD = ("operation", "ranks", "per step", "tensor", "takes (at worst)", "algbw", "busbw (at worst)", "waiting")


class Collectives(PacedView):
    """A table, the most expensive collective first. Hidden if the ranks exchange nothing."""

    name: ClassVar[str] = "collectives"
    title: ClassVar[str] = "Collectives"
    about: ClassVar[str] = (
        "A row per operation, group and bucket of the last 20 steps: its count per step, the size of its tensor, its "
        "median and worst duration, its bandwidths in Mbit/s as nccl-tests defines them, and the wait for the last "
        "rank. Durations start when the last rank arrives, so they exclude the wait."
    )
    order: ClassVar[int] = 51
    quiet: ClassVar[bool] = True

    def compute_result(self, run: Any) -> None:
        first, stop = last_steps(run.timeline, LAST_STEPS)
        self._found = make_table(by_collective(run.timeline, first, stop), max(stop - first, 1))

    def result_html(self) -> str:
        return self._found


def make_table(found: list[ByCollective], steps: int) -> str:
    """Returns the table for `steps` steps; "" without a collective.

    >>> make_table([], 20)
    ''
    """
    if not found:
        return ""
    costs = sorted(found, key=lambda f: -f.times * (f.seconds + f.waiting))
    left = len(costs) - MAX_ROWS
    note = f'<p class="wb-empty">and {left} more, in <code>run.collectives()</code>.</p>' if left > 0 else ""
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = "".join(_make_row(f, steps) for f in costs[:MAX_ROWS])
    caption = "Bandwidths in Mbit/s as nccl-tests defines them, from the last rank's arrival; last 20 steps"
    return (f'<div class="wb-table"><table><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>{note}")  # fmt: skip


def _make_row(f: ByCollective, steps: int) -> str:
    of = f" <small>{escape(f.bucket + (f' in {f.group}' if f.group else ''))}</small>" if f.bucket or f.group else ""
    worst = f" ({_format_rate(f.worst_busbw)})" if f.worst_busbw == f.worst_busbw else ""
    cells = (
        str(f.ranks),
        f"{f.times / steps:.3g}",
        format_bytes(round(f.nbytes)),
        f"{format_seconds(f.seconds)} ({format_seconds(f.slowest)})",
        _format_rate(f.algbw),
        f"{_format_rate(f.busbw)}{worst}",
        format_seconds(f.waiting),
    )
    return f"<tr><td>{escape(f.operation)}{of}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _format_rate(mbit: float) -> str:
    return f"{float(f'{mbit:.3g}'):,g}" if mbit == mbit else ""
