"""Advice: the main causes of slow steps in a record, and for each the next setting to try.

It simulates a few settings with the run's own costs, and suggests the fastest if the gain is clear. For causes that no
setting can change, it says where to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.analysis.steps.words import format_seconds
from workbench.analysis.stragglers.causes import LAST_STEPS, Cause, find_causes, why_unjudged
from workbench.analysis.stragglers.naming import join_names
from workbench.compressors.cast import Cast
from workbench.compressors.dense import Dense
from workbench.compressors.power_sgd import PowerSGD
from workbench.experiment import Experiment
from workbench.rank import StrategyError
from workbench.record.store import RunError
from workbench.settings import KnobError
from workbench.settings.describe_error import class_of, text_of
from workbench.settings.progress import doing
from workbench.sim.plan.evidence import Evidence, is_usable, sort_by_evidence
from workbench.sim.plan.search_space import learns_alike
from workbench.sim.plan.what_if import RunPredictor
from workbench.strategies.local_sgd import LocalSGD

if TYPE_CHECKING:
    from workbench.record.run import Run

MIN_GAIN = 0.03  # share of a step: smaller gains are no advice
BUCKET_FACTOR = 4  # between the present and the suggested bucket size
SUGGESTED_PERIOD = 8  # steps between two averages, if ranks meet in every step now
COLUMNS = ("cause", "ranks", "per step", "share", "what is seen", "next thing to try")
WHERE_TO_LOOK = {
    "input": "look at what loads the data: no setting makes it faster",
    "outside": "look at what else that process does between its passes",
    "frozen": "look at what stops that process from time to time",
    "network": "look at that rank's port, cable or switch",
}
WHERE_TO_LOOK |= dict.fromkeys(
    ("forward", "backward", "optimizer", "codec"), "look at what else runs next to that rank"
)


class Suggestion(NamedTuple):
    """Settings to try, with the simulator's prediction.

    settings: their values by path
    faster: share by which the simulated time per example falls
    error:  simulation error for the present settings, as a share of the measured time
    learns: whether the model may learn otherwise, so that the loss needs watching
    """

    settings: dict[str, Any]
    faster: float
    error: float
    learns: bool

    def __str__(self) -> str:
        turn = " and ".join(f"{path} to {_format_value(value)}" for path, value in self.settings.items())
        off = f" (as it is, it is {_format_percent(abs(self.error))} off)" if abs(self.error) > self.faster else ""
        watch = ", but watch the loss" if self.learns else ""
        return f"turn {turn}: the simulator says {_format_percent(self.faster)} faster{off}{watch}"


class Advice(NamedTuple):
    """A cause from `workbench.analysis.stragglers.causes`, with suggestions.

    cause:       its name, such as "exposed communication"
    ranks:       the ranks that it concerns; (): all
    seconds:     its cost per step
    share:       its cost as a share of the step
    text:        what was measured, in words
    suggestions: settings against it, the best first
    """

    cause: str
    ranks: tuple[int, ...]
    seconds: float
    share: float
    text: str
    suggestions: tuple[Suggestion, ...]

    @property
    def next(self) -> str:
        """The next things to try, in words; empty if none is known."""
        look = WHERE_TO_LOOK[self.cause] if self.ranks or self.cause in ("input", "outside") else ""
        return "; or ".join(filter(None, (*map(str, self.suggestions), look)))

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table as text."""
        who = join_names(tuple(map(str, self.ranks))) if self.ranks else "all"
        return self.cause, who, format_seconds(self.seconds), _format_percent(self.share), self.text, self.next


class AdviceTable(list[Advice]):
    """A table, the costliest cause first.

    unsimulated: why no setting could be simulated; "" if settings were simulated or not needed
    causes:      the causes that `unsimulated` holds for; (): all
    unjudged:    why the record does not show the main causes; "" if it does
    """

    unsimulated = ""
    causes: tuple[str, ...] = ()

    def __init__(self, rows: Iterable[Advice] = (), unjudged: str = "") -> None:
        super().__init__(rows)
        self.unjudged = unjudged

    def note_failures(self, reasons: Iterable[str], causes: Iterable[str], everywhere: bool) -> None:
        """Notes for which causes no setting could be simulated. `advise_run` calls it.

        reasons:    why no setting could be simulated
        causes:     the causes that lack suggestions
        everywhere: whether this holds for all causes
        """
        self.unsimulated = "; ".join(dict.fromkeys(reasons))
        self.causes = () if everywhere else tuple(dict.fromkeys(causes))

    def __repr__(self) -> str:
        if not self:
            return self.unjudged or "No single cause exceeds 5 % of the step."
        rows = [
            f"{number}. {row.cause}, {row.cells[2]} per step ({row.cells[3]} of it). {row.text}"
            + (f"\n   Next: {row.next}." if row.next else "")
            for number, row in enumerate(self, start=1)
        ]
        return "\n".join([*rows, self._failure_note] if self.unsimulated else rows)

    @property
    def _failure_note(self) -> str:
        against = f" against {', '.join(self.causes)}" if self.causes else ""
        return f"No setting{against} could be simulated: {self.unsimulated}."

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{escape(repr(self))}</p>"
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        rows = ("".join(f'<td style="text-align: left">{escape(cell)}</td>' for cell in row.cells) for row in self)
        note = f"<p>{escape(self._failure_note)}</p>" if self.unsimulated else ""
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{note}"


def advise_run(run: Run, last: int = LAST_STEPS) -> AdviceTable:
    """Returns the causes of the last `last` steps, with suggestions. Simulates for a second or more.

    If the run cannot be simulated, such as a script's own loop, causes have no suggestions. The rule in
    `workbench.sim.plan.evidence` orders suggestions. No loss is known, so settings that learn otherwise come last.
    """
    found, asked = find_causes(run.timeline, last), None
    rows = AdviceTable(unjudged=why_unjudged(run.timeline, last))
    known, failed = dict[str, tuple[Suggestion, ...]](), dict[str, str]()  # by kind
    with doing("asking the simulator what to try", len(found)) as work:
        for f in found:
            kind = _choose_kind(f)
            if kind and kind not in known:
                try:
                    asked = asked or RunPredictor(run)
                    known[kind] = _best_suggestions(asked, kind)
                except Exception as error:  # a user's own functions may fail; the causes remain valid
                    known[kind], failed[kind] = (), text_of(error).rstrip(".") or class_of(error)
            rows.append(Advice(*f, known.get(kind, ())))
            work.step()
    rows.note_failures(
        failed.values(), [f.cause for f in found if _choose_kind(f) in failed], len(failed) == len(known)
    )
    return rows


def _choose_kind(found: Cause) -> str:
    """The kind of settings that may help; "" if none may."""
    return found.cause if found.cause in ("network", "codec") else "waiting" if found.ranks else ""


def _best_suggestions(asked: RunPredictor, kind: str) -> tuple[Suggestion, ...]:
    """Returns the fastest setting that learns the same, and the fastest of all if that is faster still.

    Omits gains below MIN_GAIN.
    """
    found, every = [], list(_list_candidates(asked.now, kind))
    with doing(kind, len(every)) as work:
        for number, settings in enumerate(every):
            work.at(number)
            with suppress(KnobError, StrategyError, RunError, ValueError):  # it cannot be simulated
                found.append(_make_suggestion(asked, settings))
    best: list[Suggestion] = []
    for one in sort_by_evidence(found, lambda s: Evidence(1 - s.faster, is_usable(not s.learns, None, 0.0))):
        if one.learns not in {s.learns for s in best} and one.faster >= MIN_GAIN + (best[0].faster if best else 0.0):
            best.append(one)
    return tuple(best)


def _list_candidates(now: Experiment, kind: str) -> Iterator[dict[str, Any]]:
    """Yields changes that a lab can make live, the least disturbing first."""
    if kind == "network":
        yield from ({"bucket_mb": float(f"{now.bucket_mb * by:.3g}")} for by in (BUCKET_FACTOR, 1 / BUCKET_FACTOR))
        if isinstance(now.compressor, Dense):
            yield from ({"compressor": other} for other in (Cast(), PowerSGD.usual()))
        if hasattr(now.strategy, "accumulate"):
            yield {"strategy.accumulate": 2 * now.strategy.accumulate}
    if kind == "codec":
        yield from ({"compressor": other} for other in (Cast(), Dense()))
        return
    every = getattr(now.strategy, "every", 0)
    yield {"strategy.every": 2 * every} if every else {"strategy": LocalSGD(every=SUGGESTED_PERIOD)}


def _make_suggestion(asked: RunPredictor, settings: dict[str, Any]) -> Suggestion:
    found = asked.what_if(settings)
    examples = found.experiment.strategy.batches(1) / asked.now.strategy.batches(1)  # per step
    learns = not learns_alike(asked.now, found.experiment)
    return Suggestion(settings, 1 - found.other / found.same / examples, found.error, learns)


def _format_value(value: Any) -> str:
    """Returns code without default knobs: `PowerSGD`, `LocalSGD(every=8)`."""
    if isinstance(value, int | float):
        return f"{value:g}"
    if value == (short := getattr(value, "of", value)).usual():
        value = short
    told = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
    return type(value).__name__ + (f"({', '.join(f'{k}={v!r}' for k, v in told.items())})" if told else "")


def _format_percent(share: float) -> str:
    return f"{share * 100:.0f} %"
