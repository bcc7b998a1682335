"""The costs of a step beyond the shared compute. On request, the simulator adds suggestions."""

from __future__ import annotations

import json
import threading
from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch
from widgets.views._paced import PacedView
from workbench.analysis import Cause, find_causes
from workbench.analysis.steps.words import format_seconds
from workbench.settings import KnobError
from workbench.settings.describe_error import said

NEXT = "<code>run.advice()</code> asks the simulator for suggestions."
ASK = '<button type="button" class="wb-button" data-ask=\'{"advise": true}\'>Suggest changes</button>'
ASKING = '<p class="wb-empty" role="status">The simulator looks for suggestions. This takes some seconds.</p>'


class Causes(PacedView):
    """A line for each cause, the most expensive first. Hidden if no cause exceeds 5 % of a step."""

    name: ClassVar[str] = "causes"
    title: ClassVar[str] = "What costs a step most"
    about: ClassVar[str] = (
        "A ranked list of the causes that make a step longer than its compute: input, forward, backward, optimizer, "
        "network, codec, frozen, outside, or a pipeline's bubble. Each line has milliseconds per step, the share of a "
        "step, and the ranks that cause it. The list covers the last 40 steps since the last change. It omits causes "
        "under 5 % of a step, unless a rank is itself behind by that much."
    )
    order: ClassVar[int] = 18
    quiet: ClassVar[bool] = True
    tells: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None
        self._found: list[Cause] = []
        self._advised: Any = None
        self._asking: threading.Thread | None = None
        self._tried = ""

    def update(self, run: Any) -> Patch:
        self._run = run
        return super().update(run)

    def compute_result(self, run: Any) -> None:
        self._found = find_causes(run.timeline)

    def ask(self, request: dict[str, Any]) -> None:
        """Handles `advise` and `try`: [line, suggestion]."""
        if "advise" in request and self._run is not None and not self._is_asking:
            self._asking = threading.Thread(target=self._ask_simulator, name="advice", daemon=True)
            self._asking.start()
        if "try" in request and self.setter is not None and self._advised is not None:
            line, number = request["try"]
            self._try_suggestion(self._advised[line].suggestions[number])

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _ask_simulator(self) -> None:
        try:
            self._advised, self._tried = self._run.advice(), ""
        except Exception as error:  # shown to the person who pressed the button
            self._advised, self._tried = None, f"No suggestion: {said(error)}"

    def _try_suggestion(self, suggestion: Any) -> None:
        try:
            assert self.setter is not None
            for path, value in suggestion.settings.items():
                self.setter(path, value)
        except (KnobError, RuntimeError) as error:
            self._tried = f"Refused: {error}"
        else:
            self._tried = f"Tried: {suggestion}. See its card under “What each change did”."
            self._advised = None

    def result_html(self) -> str:
        tried = f'<p class="wb-empty" role="status">{escape(self._tried)}</p>' if self._tried else ""
        if self._is_asking:
            return list_causes(self._found, ASKING)
        if self._advised is not None:
            return list_advice(self._advised, self.setter is not None) + tried
        can_ask = hasattr(self._run, "advice") and self._run.timeline.spans
        foot = ASK if can_ask else f'<p class="wb-empty">{NEXT}</p>'
        return (list_causes(self._found, foot) + tried) if self._found else tried


def list_causes(found: list[Cause], foot: str = "") -> str:
    """Returns the list as HTML; "" without a cause.

    >>> list_causes([])
    ''
    """
    lines = (f"<li>{_describe_cause(f)}</li>" for f in found)
    return f'<ol class="wb-causes">{"".join(lines)}</ol>{foot}' if found else ""


def list_advice(rows: list[Any], may_try: bool) -> str:
    """Returns the list with suggestions. may_try: adds a button for each suggestion"""
    lines = []
    for number, row in enumerate(rows):
        more = [f"<span>{escape(row.next)}</span>" if row.next else ""]
        if may_try:
            more += [_make_button(number, k, s) for k, s in enumerate(row.suggestions)]
        lines.append(f"<li>{_describe_cause(row)}<br>{' '.join(filter(None, more)) or 'No suggestion.'}</li>")
    body = f'<ol class="wb-causes">{"".join(lines)}</ol>' if rows else f'<p class="wb-empty">{escape(repr(rows))}</p>'
    return f"{body}{ASK.replace('Suggest changes', 'Ask again')}"


def _describe_cause(found: Any) -> str:
    cost = f"{found.cause}, {format_seconds(found.seconds)} per step ({found.share * 100:.0f} % of it)"
    return f"<b>{cost}</b>: {escape(found.text)}"


def _make_button(line: int, number: int, suggestion: Any) -> str:
    """Returns a button whose label describes the change to screen readers."""
    ask = escape(json.dumps({"try": [line, number]}), quote=True)
    label = escape(f"Try this: {suggestion}", quote=True)
    named = "Try this" if number == 0 else "Try another"
    return f'<button type="button" class="wb-button" data-ask="{ask}" aria-label="{label}">{named}</button>'
