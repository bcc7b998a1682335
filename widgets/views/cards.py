"""What each change did: a card per change, before against after, each number with its spread."""

from __future__ import annotations

import math
import time
from html import escape
from typing import Any, ClassVar

from widgets.marks import ChangeMark, change_marks
from widgets.views._base import Patch, View
from workbench.analysis import Card, Effect, Estimate, before_after, last_steps

SHOWN = 6  # the newest cards; older ones are folded
EMPTY = '<p class="wb-empty">A card for each change appears here: the steps before it against the steps after it.</p>'
HEAD = "<tr><th>median of steps</th><th>before</th><th>after</th><th>change</th></tr>"


class Cards(View):
    """Median step, exposed communication, bytes and loss slope on either side of each change."""

    name: ClassVar[str] = "cards"
    title: ClassVar[str] = "What each change did"
    about: ClassVar[str] = (
        "A table per change: step time, exposed communication, bytes and loss slope before and after."
    )
    order: ClassVar[int] = 60

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._html: dict[int, str] = {}  # number of the mark -> card
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
        for step, same in list(together.items())[-2:] if self._html else together.items():
            if stop > step:
                self._html[step] = _card(same, before_after(run.timeline, step))
        html = self._page()
        if html == self._said:
            return Patch()
        self._said = html
        return Patch(html=html)

    def _page(self) -> str:
        cards = [card for _, card in sorted(self._html.items(), reverse=True)]
        if not cards:
            return EMPTY
        older = "".join(cards[SHOWN:])
        folded = f'<details data-key="older"><summary>{len(cards) - SHOWN} earlier changes</summary>{older}</details>'
        return f'<div class="wb-cards">{"".join(cards[:SHOWN])}</div>{folded if older else ""}'


def _card(marks: list[ChangeMark], card: Card) -> str:
    names = "; ".join(f"{mark.number} {mark.label}" for mark in marks)
    rows = "".join(_row(effect) for effect in card.rows)
    looked = f"steps {_span(card.before)} against {_span(card.after)}"
    caption = f"{escape(names)} <small>from step {card.step}; {looked}</small>"
    return f'<table class="wb-card"><caption>{caption}</caption><thead>{HEAD}</thead><tbody>{rows}</tbody></table>'


def _span(steps: tuple[int, int]) -> str:
    return f"{steps[0]}-{steps[1] - 1}" if steps[1] > steps[0] else "none"


def _row(effect: Effect) -> str:
    before, after = _estimate(effect.before, effect.unit), _estimate(effect.after, effect.unit)
    name = f"{escape(effect.name)}{' / 100 steps' if '100 steps' in effect.unit else ''}"
    cells = "".join(f"<td>{cell}</td>" for cell in (before, after, _words(effect)))
    return f'<tr title="{escape(effect.spread)}"><th scope="row">{name}</th>{cells}</tr>'


def _estimate(e: Estimate, unit: str) -> str:
    if math.isnan(e.value):
        return "too few steps"
    spread = "" if math.isnan(e.low) else f" <small>[{_number(e.low, unit)}, {_number(e.high, unit)}]</small>"
    return f"{_number(e.value, unit, named=True)}{spread}"


def _number(value: float, unit: str, *, named: bool = False) -> str:
    if unit == "bytes":
        scale, name = (1e6, "MB") if abs(value) >= 1e5 else (1e3, "kB")
        return f"{value / scale:.3g}{' ' + name if named else ''}"
    if unit == "ms":
        return f"{value:.3g}{' ms' if named else ''}" if abs(value) < 1000 else f"{value / 1e3:.3g} s"
    return f"{value:+.3g}".replace("-", "\N{MINUS SIGN}")


def _words(effect: Effect) -> str:
    """The ratio with an arrow and a word, or that none can be told from the spread."""
    b, a = effect.before, effect.after
    if math.isnan(b.value) or math.isnan(a.value):
        return "not yet known"
    if a.low <= b.high and b.low <= a.high:
        return "&asymp; no clear change"
    if "slope" in effect.name:
        slower = "falls slower" if a.value < 0 else "rises"
        return "&#9660; falls faster" if a.value < b.value else f"&#9650; {slower}"
    if not b.value or not a.value:
        return "&#9660; none any more" if not a.value else "&#9650; new"
    more = a.value > b.value
    ratio = a.value / b.value if more else b.value / a.value
    return f"&#9650; up, &times; {ratio:.3g}" if more else f"&#9660; down, &divide; {ratio:.3g}"
