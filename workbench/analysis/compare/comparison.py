"""Compares 2 runs or 2 segments of one: is the second better, worse or alike?

Step time, exposed communication and bytes are medians over the comparable steps (`compare.comparable_steps`). Training
losses are means over ranks. They are compared at equal steps, examples or seconds. The values are medians over the last
10 % of the common range without their slope. Lower is better.

The 99 % intervals are those of `compare.clear_difference`. They separate noise within runs from a difference between
runs. A busier machine may also cause a difference. Each of the 6 metrics is a separate question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.analysis.compare.clear_difference import MIN_RATIO_CHANGE, MIN_STEPS, draw_medians, why_few
from workbench.analysis.compare.comparable_steps import Side
from workbench.analysis.steps.examples import examples_made
from workbench.analysis.steps.window import Window, last_steps
from workbench.record.store import RunError
from workbench.settings import in_words, short

if TYPE_CHECKING:
    from workbench.record.run import Run
    from workbench.record.timeline import Timeline

MAX_VALUES = 4000  # values per side for the draws
LAST_SHARE = 0.1  # of the common range
MIN_DIFFERENCE = 1e-4  # seconds: the least difference that matters
WORSE, BETTER, ALIKE, UNKNOWN = "worse", "better", "alike", "unknown"
ALIGNED = ("steps", "examples", "seconds")  # axes of losses


class Compared(NamedTuple):
    """One quantity of 2 runs. Lower is better.

    a, b:       medians, or NaN
    difference: b - a, with its 99 % interval `[low, high]`. NaN for too few values
    verdict:    on b: "worse", "better", "alike" or "unknown" (see `why`)
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


class LossCurve(NamedTuple):
    """A run's training loss per step, mean over ranks."""

    loss: np.ndarray  # (n,)
    steps: np.ndarray  # (n,) steps so far
    seconds: np.ndarray  # since the first step began
    examples: np.ndarray  # of all ranks, so far; empty if unrecorded

    def progress_along(self, aligned: str) -> np.ndarray:
        """`(n,)` progress along `aligned`, or empty."""
        return np.asarray(getattr(self, aligned))


def compare_runs(a: Run, b: Run, tolerance: float = 0.0) -> list[Compared]:
    """Compares `b` with `a`. Raises RunError for a bad `tolerance`.

    tolerance: share of a's value by which b may be worse, from 0 to 10. "worse" needs the whole interval beyond it
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance <= 10:
        raise RunError(f"tolerance={short(tolerance)}: must be a share from 0 to 10, such as 0.05")
    was, now = (make_side(run.timeline) for run in (a, b))
    lacks = _join_reasons(was.lacks, now.lacks)
    rows = [
        judge_metric("step time", "s", was.seconds, now.seconds, lacks, tolerance, MIN_DIFFERENCE),
        judge_metric("exposed communication", "s", was.exposed, now.exposed, lacks, tolerance, MIN_DIFFERENCE),
        judge_metric("bytes per step and rank", "bytes", was.nbytes, now.nbytes, lacks, tolerance),
    ]
    before, after = loss_curve(a.timeline), loss_curve(b.timeline)
    return rows + [_compare_losses(before, after, aligned, tolerance) for aligned in ALIGNED]


def make_side(tl: Timeline) -> Side:
    """A run's comparable steps."""
    first, stop = last_steps(tl)
    return Side(tl, first, stop, begins=first)


def judge_metric(
    metric: str, unit: str, before: np.ndarray, after: np.ndarray, lacks: str, tolerance: float, least: float = 0.0
) -> Compared:
    """Compares `(n,)` values of one run with `(m,)` of the other.

    least: the least difference that matters
    """
    before, after = (values[np.isfinite(values)] for values in (before, after))
    a, b = (float(np.median(values)) if len(values) else float("nan") for values in (before, after))
    lacks = lacks or ("" if len(before) and len(after) else "one side has no values")
    if lacks:
        return Compared(metric, unit, a, b, b - a, float("nan"), float("nan"), UNKNOWN, lacks)
    draws = draw_medians(_thin_values(after), 1) - draw_medians(_thin_values(before), 0)
    low, high = (float(q) for q in np.quantile(draws, [0.005, 0.995], method="nearest"))
    allowed, worth = tolerance * abs(a), max(MIN_RATIO_CHANGE * abs(a), least)
    verdict = ALIKE
    if abs(b - a) > worth:
        verdict = WORSE if low > allowed else BETTER if high < -allowed else ALIKE
    return Compared(metric, unit, a, b, b - a, low, high, verdict)


def loss_curve(tl: Timeline) -> LossCurve:
    """Returns the training loss per step, without steps that lack a finite loss."""
    rows = tl.samples.rows()
    rows = rows[rows.equal("name", "loss") & np.isfinite(rows.value)] if len(rows) else rows
    if not len(rows):
        return LossCurve(*(np.empty(0),) * 4)
    steps, at, many = np.unique(rows.step, return_inverse=True, return_counts=True)
    ended = np.full(len(steps), -np.inf)
    np.maximum.at(ended, at, rows.t)
    first = Window(tl, int(steps[0]), int(steps[0]) + 1).lane("step")
    begun = float(first.t0.min()) if len(first) else float(ended[0])
    loss = np.bincount(at, rows.value) / many
    return LossCurve(loss, steps - steps[0] + 1.0, ended - begun, examples_made(tl, steps))


def list_differences(a: Run, b: Run) -> list[str]:
    """Returns the initial settings that differ as text: `"strategy: DDP(), LocalSGD(every=8)"`."""
    was, now = a.settings_today, b.settings_today
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{name}: {in_words(was.get(name))}, {in_words(now.get(name))}" for name in names]


def _compare_losses(before: LossCurve, after: LossCurve, aligned: str, tolerance: float) -> Compared:
    """Uses the last 10 % of the common range, or its last `MIN_STEPS` steps."""
    metric, along = f"loss at equal {aligned}", (before.progress_along(aligned), after.progress_along(aligned))
    if not all(map(len, along)):
        nothing = "no loss on the record"
        if aligned == "examples":
            nothing = "the number of examples per step is not on the record"
        return judge_metric(metric, "", np.empty(0), np.empty(0), nothing, tolerance)
    common = min(float(x[-1]) for x in along)
    values: list[np.ndarray] = []
    lacks: list[str] = []
    for found, x in zip((before, after), along, strict=True):
        stop = int(np.searchsorted(x, common, side="right"))
        first = min(int(np.searchsorted(x, (1 - LAST_SHARE) * common, side="right")), max(0, stop - MIN_STEPS))
        values.append(_remove_trend(x[first:stop], found.loss[first:stop], (1 - LAST_SHARE / 2) * common))
        lacks.append(why_few(stop - first, stop - first, rounds=False))
    return judge_metric(metric, "", values[0], values[1], _join_reasons(*lacks), tolerance)


def _remove_trend(x: np.ndarray, losses: np.ndarray, at: float) -> np.ndarray:
    if len(x) < MIN_STEPS:
        return losses
    slope = np.polynomial.Polynomial.fit(x, losses, 1).deriv()(at)
    return np.asarray(losses - slope * (x - at))


def _join_reasons(a: str, b: str) -> str:
    return ". ".join(f"{name}: {lacks}" for name, lacks in (("a", a), ("b", b)) if lacks)


def _thin_values(values: np.ndarray) -> np.ndarray:
    """Returns at most `MAX_VALUES` evenly spread values, for the draws' memory."""
    if len(values) <= MAX_VALUES:
        return values
    return values[np.linspace(0, len(values) - 1, MAX_VALUES).astype(int)]
