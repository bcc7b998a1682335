"""A card for each change, with values before and after it and their intervals."""

from __future__ import annotations

import math
import time
from html import escape
from itertools import zip_longest
from typing import Any, ClassVar

from widgets.charts.marks import ChangeMark, change_marks
from widgets.views._base import Patch, View
from workbench.analysis import Card, Effect, Estimate, before_after, last_steps

MAX_OPEN_CARDS = 6  # newest cards; the page folds older ones
EMPTY = '<p class="wb-empty">A card for each change appears here. It compares the steps before and after it.</p>'
HEAD = "<tr><th>median of steps</th><th>before</th><th>after</th>"
HEAD += '<th style="text-align: left">change</th></tr>'
SHORT = {"exposed communication": "exposed", "sent per step and rank": "sent"}  # all columns fit into half a page
MEANS = {
    "step": "how long a step lasts",
    "exposed communication": "how long communication stalls a step",
    "sent per step and rank": "bytes that a rank sends in a step",
}


class Cards(View):
    """Step time, exposed communication, bytes and loss slope before and after each change."""

    name: ClassVar[str] = "cards"
    title: ClassVar[str] = "What each change did"
    about: ClassVar[str] = (
        "A table per change: step time, exposed communication, bytes and loss slope before and after it."
    )
    order: ClassVar[int] = 60
    tells: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._html: dict[int, str] = {}  # by the change's step
        self._over: set[int] = set()  # final: a later change has ended their steps
        self._said = ""

    def update(self, run: Any) -> Patch:
        now = time.monotonic()
        if self._said and (len(run.timeline.spans) == self.cursor or (run.live and now - self._at < 1.5)):
            return Patch()
        self.cursor, self._at = len(run.timeline.spans), now
        marks, stop = change_marks(run), last_steps(run.timeline)[1]
        together: dict[int, list[ChangeMark]] = {}
        for mark in marks:
            together.setdefault(mark.step, []).append(mark)
        for step, following in zip_longest(together, list(together)[1:]):
            if stop > step and step not in self._over:
                self._html[step] = _make_card(together[step], before_after(run.timeline, step))
                if following is not None and stop >= following:
                    self._over.add(step)
        html = self._make_page()
        if html == self._said:
            return Patch()
        self._said = html
        return Patch(html=html)

    def _make_page(self) -> str:
        cards = [card for _, card in sorted(self._html.items(), reverse=True)]
        if not cards:
            return EMPTY
        older = "".join(cards[MAX_OPEN_CARDS:])
        count = len(cards) - MAX_OPEN_CARDS
        folded = f'<details data-key="older"><summary>{count} earlier changes</summary>{older}</details>'
        return f'<div class="wb-cards">{"".join(cards[:MAX_OPEN_CARDS])}</div>{folded if older else ""}'


def _make_card(marks: list[ChangeMark], card: Card) -> str:
    names = "; ".join(f"{mark.number} {mark.label}" for mark in marks)
    *times, loss = card.rows
    rows = "".join(_make_row(effect) for effect in times) + _loss_row(loss) + _lacking_row(times[0])
    looked = f"steps {_format_steps(card.before)} against {_format_steps(card.after)}"
    made = (
        f"making it sent {_format_number(card.nbytes, 'bytes', named=True)} and took {_format_seconds(card.seconds)}; "
    )
    made = made if card.nbytes else ""
    caption = f"{escape(names)} <small>from step {card.step}; {made}{looked}</small>"
    return f'<table class="wb-card"><caption>{caption}</caption><thead>{HEAD}</thead><tbody>{rows}</tbody></table>'


def _format_steps(steps: tuple[int, int]) -> str:
    return f"{steps[0]}-{steps[1] - 1}" if steps[1] > steps[0] else "none"


def _make_row(effect: Effect) -> str:
    before, after = _format_estimate(effect.before, effect.unit), _format_estimate(effect.after, effect.unit)
    cells = "".join(f"<td>{cell}</td>" for cell in (before, after, _describe_effect(effect)))
    title = escape(f"{MEANS[effect.name]}; {effect.spread}")
    return f'<tr title="{title}"><th scope="row">{SHORT.get(effect.name, effect.name)}</th>{cells}</tr>'


def _loss_row(effect: Effect) -> str:
    assert effect.trends is not None
    lines = [escape(f"{when}: {trend}") for when, trend in zip(("before", "after"), effect.trends, strict=True)]
    lines += [words] if (words := _describe_slopes(effect)) else []
    return f'<tr title="{escape(effect.spread)}"><th scope="row">loss</th>{_wide_cell(3, "<br>".join(lines))}</tr>'


def _lacking_row(effect: Effect) -> str:
    if not effect.change.lacks:
        return ""
    return f"<tr>{_wide_cell(4, f'No verdict. {escape(effect.change.lacks)}.')}</tr>"


def _wide_cell(columns: int, html: str) -> str:
    """Returns a cell over several columns that does not widen the table."""
    inner = f'<div style="width: 0; min-width: 100%; white-space: normal">{html}</div>'
    return f'<td colspan="{columns}" style="text-align: left">{inner}</td>'


def _format_estimate(e: Estimate, unit: str) -> str:
    if math.isnan(e.value):
        return "&ndash;"
    spread = (
        ""
        if math.isnan(e.low)
        else f"<br><small>[{_format_number(e.low, unit)}, {_format_number(e.high, unit)}]</small>"
    )
    return f"{_format_number(e.value, unit, named=True)}{spread}"


def _format_number(value: float, unit: str, *, named: bool = False) -> str:
    if unit == "bytes":
        scale, name = (1e6, "MB") if abs(value) >= 1e5 else (1e3, "kB")
        return f"{value / scale:.3g}{' ' + name if named else ''}"
    return f"{value:.3g}{' ms' if named else ''}" if abs(value) < 1000 else f"{value / 1e3:.3g} s"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def _describe_effect(effect: Effect) -> str:
    """Returns the ratio with its interval, an arrow and a word; or "no clear change"."""
    match effect.verdict:
        case "":
            return "no verdict"
        case "same":
            return "&asymp; no clear change"
        case "more":
            r = effect.change
            return (
                "&#9650; new" if math.isinf(r.value) else f"&#9650; up, &times; {_format_ratio(r.value, r.low, r.high)}"
            )
    r = effect.change
    return (
        f"&#9660; down, &divide; {_format_ratio(1 / r.value, 1 / r.high, 1 / r.low)}"
        if r.low > 0
        else "&#9660; hardly any"
    )


def _format_ratio(value: float, low: float, high: float) -> str:
    return f"{value:.3g}<br><small>[{low:.3g}, {high:.3g}]</small>"


def _describe_slopes(effect: Effect) -> str:
    if effect.verdict in ("", "same"):
        return "&asymp; no clear change of the slope" if effect.verdict else ""
    was, now = (trend.sign for trend in effect.trends or ())
    arrow = "&#9650;" if effect.verdict == "more" else "&#9660;"
    if not now:
        return f"{arrow} no longer {'falls' if was < 0 else 'rises'} clearly" if was else ""
    verb = "rises" if now > 0 else "falls"
    if now != was:
        return f"{arrow} {verb}"
    return f"{arrow} {verb} {'faster' if (now > 0) == (effect.verdict == 'more') else 'slower'}"
