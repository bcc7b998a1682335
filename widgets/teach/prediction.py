"""A prediction before the run. It is locked when its result becomes visible."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any
from weakref import WeakKeyDictionary, ref

import ipywidgets

from widgets.teach.said import ShownText
from widgets.teach.worksheet import store_note

STYLE = "<style>.twb-lesson { --jp-widgets-font-size: 14px; } .twb-lesson p { margin: 2px 0; }</style>"


FIRST = "Predict first: choose an answer above, then run this cell again. Until then nothing is shown."


@dataclass
class PredictionGuess:
    """The answer to a question and its lock."""

    before: Any  # weak reference to the run that had ended before the question, or None
    said: str | None = None
    late: bool = False  # a run was visible before the answer
    shown: str = ""  # the true answer, once visible


# A cell that runs again makes a new widget. The lab keeps the guess, so no one can guess twice.
_guesses: WeakKeyDictionary[Any, dict[tuple[str, ...], PredictionGuess]] = WeakKeyDictionary()


class Prediction(ipywidgets.VBox):
    """A question with answers to choose from. `against(...)` compares the guess later.

    A guess is locked when the answer is shown, or when a run of `lab` begins after the question. Without a guess
    nothing is shown, so running all cells reveals nothing. A question to the same lab keeps its guess and lock.

    during: the question is about a change to the present run, so only the answer locks the guess

    >>> guess = Prediction("How long is a step?", ["100 ms", "200 ms"])
    >>> guess.against("200 ms")
    'Predict first: choose an answer above, then run this cell again. Until then nothing is shown.'
    >>> guess.choose("100 ms")
    >>> guess.against("200 ms")
    'You predicted: 100 ms. The record says: 200 ms. A surprise: think of a reason before you read on.'
    >>> guess.choose("200 ms")
    Traceback (most recent call last):
        ...
    ValueError: answer='200 ms': the prediction is locked at '100 ms', since the answer has been shown
    """

    def __init__(self, question: str, answers: list[str], lab: Any = None, *, during: bool = False) -> None:
        self.question, self.answers, self.lab, self.during = question, answers, lab, during
        self._guess = self._find_guess()
        wide = ipywidgets.Layout(width="auto")
        self.radio = ipywidgets.RadioButtons(options=answers, value=self.said, layout=wide, disabled=bool(self.locked))
        self.radio.observe(lambda change: self._store_answer(change["new"]), "value")
        self.told = ipywidgets.HTML()
        self.told.add_class("twb-told")
        super().__init__([ipywidgets.HTML(f"{STYLE}<b>{escape(question)}</b>"), self.radio, self.told])
        self.add_class("twb-lesson")
        store_note("prediction", question)
        if self.said is not None:
            self._show_text(f"Your prediction: {self.said}.")

    def _find_guess(self) -> PredictionGuess:
        over = None if self.lab is None or self.lab.live else self.lab.run_now
        new = PredictionGuess(None if over is None else ref(over))
        if self.lab is None:
            return new
        return _guesses.setdefault(self.lab, {}).setdefault((self.question, *self.answers), new)

    @property
    def said(self) -> str | None:
        return self._guess.said

    @property
    def locked(self) -> str:
        """Why the guess is locked, or ""."""
        if self._guess.shown:
            return "the answer has been shown"
        return "the run has begun" if self.said is not None and self._has_begun and not self._guess.late else ""

    @property
    def _has_begun(self) -> bool:
        run = None if self.lab is None or self.during else self.lab.run_now
        return run is not None and (self._guess.before is None or run is not self._guess.before())

    def choose(self, answer: str) -> None:
        """Answers from Python. Raises ValueError if the guess is locked or the answer unknown."""
        if answer not in self.answers:
            raise ValueError(f"answer={answer!r}: must be one of {', '.join(map(repr, self.answers))}")
        if (why := self.locked) and answer != self.said:
            raise ValueError(f"answer={answer!r}: the prediction is locked at {self.said!r}, since {why}")
        self.radio.value = answer

    def against(self, truth: str) -> str:
        """Compares the guess with the record and locks it. Without a guess, asks for one."""
        if self.said is None:
            return ShownText(FIRST)
        self._guess.shown = f"The record says: {truth}."
        store_note("prediction", self.question, answer=truth)
        verdict = "As you said." if self.said == truth else "A surprise: think of a reason before you read on."
        when = " (when the run had begun)" if self._guess.late else ""
        self._lock_guess()
        return ShownText(f"You predicted{when}: {self.said}. {self._guess.shown} {verdict}")

    def after(self, shown: Any) -> Any:
        """Returns `shown` and locks the guess. Without a guess, asks for one."""
        if self.said is None:
            return ShownText(FIRST)
        self._guess.shown = self._guess.shown or "what was asked for has been shown"
        self._lock_guess()
        return shown

    def _lock_guess(self) -> None:
        self.radio.disabled = True
        self._show_text(f"Your prediction stands: {self.said}.")

    def _store_answer(self, answer: str | None) -> None:
        """Stores an answer from the page or `choose`. Restores a locked one."""
        if answer == self.said:
            return
        if why := self.locked:
            self.radio.value = self.said
            self.radio.disabled = True
            return self._show_text(f"Your prediction stays “{self.said}”: {why}.")
        if self.said is None:
            self._guess.late = self._has_begun
        self._guess.said = answer
        store_note("prediction", self.question, said=answer, late=self._guess.late)
        self._show_text(f"Your prediction: {answer}.")

    def _show_text(self, text: str) -> None:
        self.told.value = f'<p role="status">{escape(text)}</p>'

    def __repr__(self) -> str:
        return f"Prediction({self.question!r}, {self.said or 'open'})"
