"""Two runs, or two segments of one, side by side: is the second better, worse or alike, and how sure is that?

Step time, exposed communication and bytes are medians over the steps that are fit to be compared (`analysis.sides`).
Losses are training losses, mean over ranks: medians over the last tenth of what both runs have in common, counted in
steps, in examples or in seconds, each moved to the middle of it along the line that they fall or rise along. Less is
better of all metrics.

A difference has a 99 % interval by the bootstrap of `analysis.clear`, which allows for steps that are alike from one to
the next. It tells noise within runs from a difference between them, not why they differ: two runs of the same settings
on a machine that was busier for one of them do differ. Every metric is one question at 99 %, and six are asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.analysis.compare.clear import LEAST_STEPS, WORTH, drawn, lacking
from workbench.analysis.compare.sides import Side
from workbench.analysis.steps.examples import examples_made
from workbench.analysis.steps.window import Window, last_steps
from workbench.record.store import RunError
from workbench.settings import in_words, short

if TYPE_CHECKING:
    from workbench.record.run import Run
    from workbench.record.timeline import Timeline

MOST = 4000  # values of a side that draws are made of
LAST = 0.1  # of what two runs have in common, in which losses are compared
SHORT = 1e-4  # seconds that are not worth a word
WORSE, BETTER, ALIKE, UNKNOWN = "worse", "better", "alike", "unknown"
ALIGNED = ("steps", "examples", "seconds")  # by what losses are aligned


class Compared(NamedTuple):
    """One quantity of two runs, less of which is better.

    a, b:       medians; NaN where a run has none
    difference: b - a, with its 99 % interval [low, high]; NaN where there are too few values
    verdict:    of b: "worse", "better", "alike", or "unknown", and `why` that is
    """

    metric: str
    unit: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    verdict: str
    why: str = ""


class Curve(NamedTuple):
    """The training loss of a run, mean over ranks, step by step from its first step on."""

    loss: np.ndarray  # (n,)
    steps: np.ndarray  # (n,) made so far
    seconds: np.ndarray  # (n,) since the first step began
    examples: np.ndarray  # (n,) all ranks together had trained on; empty where the record does not say

    def along(self, aligned: str) -> np.ndarray:
        """(n,) how much of `aligned` had been done; empty where that is not known."""
        return np.asarray(getattr(self, aligned))


def compare(a: Run, b: Run, tolerance: float = 0.0) -> list[Compared]:
    """What `b` is beside `a`, quantity by quantity.

    tolerance: share of a's value by which b may be worse, 0 to 10: "worse" is said where the whole interval lies beyond
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance <= 10:
        raise RunError(f"tolerance={short(tolerance)}: must be a share from 0 to 10, such as 0.05")
    was, now = (side(run.timeline) for run in (a, b))
    lacks = _both(was.lacks, now.lacks)
    rows = [
        judged("step time", "s", was.seconds, now.seconds, lacks, tolerance, SHORT),
        judged("exposed communication", "s", was.exposed, now.exposed, lacks, tolerance, SHORT),
        judged("bytes per step and rank", "bytes", was.nbytes, now.nbytes, lacks, tolerance),
    ]
    before, after = curve(a.timeline), curve(b.timeline)
    return rows + [_losses(before, after, aligned, tolerance) for aligned in ALIGNED]


def side(tl: Timeline) -> Side:
    """The steps of a run that are fit to be compared."""
    first, stop = last_steps(tl)
    return Side(tl, first, stop, begins=first)


def judged(
    metric: str, unit: str, before: np.ndarray, after: np.ndarray, lacks: str, tolerance: float, least: float = 0.0
) -> Compared:
    """(n,) values of one run against (m,) of the other; a difference up to `least` is not worth a word."""
    before, after = (values[np.isfinite(values)] for values in (before, after))
    a, b = (float(np.median(values)) if len(values) else float("nan") for values in (before, after))
    lacks = lacks or ("" if len(before) and len(after) else "nothing is known of one side")
    if lacks:
        return Compared(metric, unit, a, b, b - a, float("nan"), float("nan"), UNKNOWN, lacks)
    draws = drawn(_few(after), 1) - drawn(_few(before), 0)
    low, high = (float(q) for q in np.quantile(draws, [0.005, 0.995], method="nearest"))
    allowed, worth = tolerance * abs(a), max(WORTH * abs(a), least)
    verdict = ALIKE
    if abs(b - a) > worth:
        verdict = WORSE if low > allowed else BETTER if high < -allowed else ALIKE
    return Compared(metric, unit, a, b, b - a, low, high, verdict)


def curve(tl: Timeline) -> Curve:
    """The training loss of a run step by step; steps in which no rank's was finite are left out."""
    rows = tl.samples.rows()
    rows = rows[rows.equal("name", "loss") & np.isfinite(rows.value)] if len(rows) else rows
    if not len(rows):
        return Curve(*(np.empty(0),) * 4)
    steps, at, many = np.unique(rows.step, return_inverse=True, return_counts=True)
    ended = np.full(len(steps), -np.inf)
    np.maximum.at(ended, at, rows.t)
    first = Window(tl, int(steps[0]), int(steps[0]) + 1).lane("step")
    begun = float(first.t0.min()) if len(first) else float(ended[0])
    loss = np.bincount(at, rows.value) / many
    return Curve(loss, steps - steps[0] + 1.0, ended - begun, examples_made(tl, steps))


def differing(a: Run, b: Run) -> list[str]:
    """The settings that two runs began with otherwise, in words: "strategy: DDP(), LocalSGD(every=8)"."""
    was, now = a.settings_today, b.settings_today
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{name}: {in_words(was.get(name))}, {in_words(now.get(name))}" for name in names]


def _losses(before: Curve, after: Curve, aligned: str, tolerance: float) -> Compared:
    """Their losses in the last tenth of what both have in common, or in the last twenty steps of it."""
    metric, along = f"loss at equal {aligned}", (before.along(aligned), after.along(aligned))
    if not all(map(len, along)):
        nothing = "no loss on the record"
        if aligned == "examples":
            nothing = "how many examples a step has is not on the record"
        return judged(metric, "", np.empty(0), np.empty(0), nothing, tolerance)
    common = min(float(x[-1]) for x in along)
    values: list[np.ndarray] = []
    lacks: list[str] = []
    for found, x in zip((before, after), along, strict=True):
        stop = int(np.searchsorted(x, common, side="right"))
        first = min(int(np.searchsorted(x, (1 - LAST) * common, side="right")), max(0, stop - LEAST_STEPS))
        values.append(_level(x[first:stop], found.loss[first:stop], (1 - LAST / 2) * common))
        lacks.append(lacking(stop - first, stop - first, rounds=False))
    return judged(metric, "", values[0], values[1], _both(*lacks), tolerance)


def _level(x: np.ndarray, losses: np.ndarray, at: float) -> np.ndarray:
    """(n,) losses as they might have been at `at`, all of them: without the line that they fall or rise along."""
    if len(x) < LEAST_STEPS:
        return losses
    slope = np.polynomial.Polynomial.fit(x, losses, 1).deriv()(at)
    return np.asarray(losses - slope * (x - at))


def _both(a: str, b: str) -> str:
    return ". ".join(f"{name}: {lacks}" for name, lacks in (("a", a), ("b", b)) if lacks)


def _few(values: np.ndarray) -> np.ndarray:
    """At most `MOST` of them, evenly spread: of 70,000 steps no draw could be made in memory."""
    if len(values) <= MOST:
        return values
    return values[np.linspace(0, len(values) - 1, MOST).astype(int)]
