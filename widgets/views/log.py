"""The ranks' prints, warnings and log messages by rank, folded."""

from __future__ import annotations

import json
from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.record.alarms import NAMES, describe_value
from workbench.settings import Change

MAX_LINES = 100  # different lines, at most
WRONG = ("error", "refused", *NAMES)  # streams shown first and never folded
EMPTY = '<p class="wb-empty">Prints, warnings and logs of the ranks appear here. Equal lines are folded.</p>'


class LogLine:
    """One text, with a count by rank."""

    def __init__(self, stream: str, text: str) -> None:
        self.stream = stream
        self.text = text
        self.ranks: dict[int, int] = {}  # rank -> count
        self.step = 0

    def to_html(self) -> str:
        often = sum(self.ranks.values())
        times = f" &times;{often}" if often > len(self.ranks) else ""
        first, _, rest = self.text.strip().partition("\n")
        who = f"<b>{_format_ranks(sorted(self.ranks))}</b> {escape(self.stream)}"
        head = f"{who}, step {self.step}{times}: {escape(first[:300])}"
        if not rest and len(first) <= 300:
            return f"<div>{head}</div>"
        key = escape(f"{self.stream}{hash(self.text)}")
        return f'<details data-key="{key}"><summary>{head}</summary><pre>{escape(self.text[:20000])}</pre></details>'


class Log(View):
    """Prints, warnings and logs of the ranks. Errors are first."""

    name: ClassVar[str] = "log"
    title: ClassVar[str] = "Messages of the ranks"
    about: ClassVar[str] = "Prints, warnings, logs and errors of the ranks. Equal lines of several ranks are one line."
    order: ClassVar[int] = 70

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, str], LogLine] = {}
        self._begun = False

    def update(self, run: Any) -> Patch:
        new = False
        rows = self.fresh(run.timeline.marks)
        for rank, step, name, detail in zip(rows.rank, rows.step, rows.name, rows.detail, strict=True):
            if (said := _read_mark(str(name), json.loads(detail))) is not None:
                line = self._lines.pop(said, None) or LogLine(*said)
                self._lines[said] = line
                line.ranks[int(rank)] = line.ranks.get(int(rank), 0) + 1
                line.step, new = int(step), True
        if not new and self._begun:
            return Patch()
        self._begun = True
        while len(self._lines) > MAX_LINES:
            self._lines.pop(next(iter(self._lines)))
        return Patch(html=self._make_html())

    def _make_html(self) -> str:
        if not self._lines:
            return EMPTY
        lines = list(reversed(self._lines.values()))
        wrong = [line.to_html() for line in lines if line.stream in WRONG]
        rest = [line for line in lines if line.stream not in WRONG]
        said = sum(sum(line.ranks.values()) for line in rest)
        folded = "".join(line.to_html() for line in rest)
        count = f"{said} line{'s' if said != 1 else ''}, {len(rest)} different"
        more = f'<details data-key="all"><summary>{count}</summary>{folded}</details>' if rest else ""
        return f'<div class="wb-log">{"".join(wrong)}{more}</div>'


def _read_mark(name: str, detail: dict[str, Any]) -> tuple[str, str] | None:
    """Returns (stream, text) of a mark, or None without a text."""
    match name:
        case "log":
            text = str(detail.get("text", "")).rstrip()
            return (str(detail.get("stream", "log")), text) if text else None
        case "error":
            where = f"rank {detail.get('rank')}, step {detail.get('step')}, {detail.get('op')}"
            return "error", f"{where}: {detail.get('type')}: {detail.get('text')}\n{detail.get('traceback', '')}"
        case "nan" | "diverged":
            return name, describe_value(name, detail) + ("; that step was skipped" if detail.get("skipped") else "")
        case "refused":
            return "refused", f"{Change.read(detail).text}: {detail.get('reason')}"
        case "optimizer" | "momentum" | "own":
            return name, str(detail.get("text"))
        case "residual":
            return ("residual", str(detail["text"])) if "text" in detail else None
        case "stood still" | "spool" | "saved" | "not saved" | "data" | "hang" | "evicted" | "asked" | "members":
            return name, str(detail.get("text"))
        case "rolled back" | "not rolled back" | "preempted" | "profile" | "warning":
            return name, str(detail.get("text"))
        case "fault":
            return "fault", str(detail.get("text") or json.dumps(detail))
    return None


def _format_ranks(ranks: list[int]) -> str:
    """Formats ranks: `rank 2`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
