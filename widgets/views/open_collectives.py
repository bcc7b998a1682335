"""The ranks that wait in a collective, and the missing ranks."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import list_open
from workbench.analysis.communication.open_collectives import OpenCollective

MIN_WAIT = 1.5  # seconds; the kernel asks once a second, so shorter waits are not shown
STACKS = "Press Stacks, above, to see the call stack of every thread of every rank."


class OpenCollectives(View):
    """A row for each collective in which ranks wait for other ranks."""

    name: ClassVar[str] = "entered"
    title: ClassVar[str] = "Waiting in a collective"
    about: ClassVar[str] = (
        "A row per collective in which ranks have waited for more than 1.5 seconds: the ranks that have entered it, "
        "the missing ranks, and what these do instead."
    )
    order: ClassVar[int] = 4
    quiet: ClassVar[bool] = True
    tells: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._said: str | None = None

    def update(self, run: Any) -> Patch:
        said = make_table(list_open(run.standing)) if run.live else ""
        if said == self._said:
            return Patch()
        self._said = said
        return Patch(html=said)


def make_table(found: list[OpenCollective]) -> str:
    """Returns the table; "" if no rank waits long for another.

    >>> make_table([OpenCollective(7, "all_reduce bucket 1", (0, 2), 0.2, ((1, "backward of step 7, for 4 s"),))])
    ''
    """
    long = [e for e in found if e.seconds > MIN_WAIT and e.missing]
    if not long:
        return ""
    rows = "".join(
        f"<tr><td>{escape(e.collective)} of step {e.step}</td><td>{', '.join(map(str, e.entered))}</td>"
        f"<td>{e.seconds:.0f} s</td><td>{'; '.join(f'rank {r}: {escape(text)}' for r, text in e.missing)}</td></tr>"
        for e in long
    )
    head = "<th>collective</th><th>ranks that have entered</th><th>wait for</th><th>ranks that have not</th>"
    return (f'<div class="wb-table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            f'<p class="wb-empty">{STACKS}</p>')  # fmt: skip
