"""What a change did: the steps before it against the steps after it, with spread, never across another change.

Left out are the step of the change itself, steps next to an evaluation, a hand-over or a pause, and measured steps.
Where ranks meet only every few steps, whole rounds are compared, so that the meeting's cost is shared out fairly.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from workbench.analysis.collectives import lined_up
from workbench.analysis.window import Window, change_steps, last_steps
from workbench.timeline import Timeline

DRAWS = 400  # of the bootstrap
FEWEST = 3  # steps or rounds that a median is taken over
REACH = 4  # where rounds are long, this many windows are looked at


class Estimate(NamedTuple):
    """A number with its 95 % interval, from `n` values; NaN where there are too few."""

    value: float
    low: float
    high: float
    n: int


class Effect(NamedTuple):
    """One row of the card: a quantity before and after the change."""

    name: str
    unit: str
    before: Estimate
    after: Estimate
    spread: str = "95 % bootstrap interval of the median"

    @property
    def ratio(self) -> float:
        return self.after.value / self.before.value if self.before.value else float("nan")


class Card(NamedTuple):
    """What the change before step `step` did; `text` names the change."""

    step: int
    text: str
    before: tuple[int, int]  # [first, stop) of the steps looked at
    after: tuple[int, int]
    rows: tuple[Effect, ...]


def before_after(tl: Timeline, change_step: int, window: int = 50) -> Card:
    """Median step, exposed communication, bytes and loss slope in the `window` steps on either side of a change."""
    every = change_steps(tl)
    floor = int(max([s for s in every if s < change_step], default=0))
    ceiling = int(min([s for s in every if s > change_step], default=last_steps(tl)[1]))
    ceiling = max(min(ceiling, last_steps(tl)[1]), change_step)
    before = Side(tl, max(change_step - window, floor), change_step, begins=floor)
    after = Side(tl, change_step, min(change_step + 1 + window, ceiling), begins=change_step)
    if before.few:
        before = Side(tl, max(change_step - REACH * window, floor), change_step, begins=floor)
    if after.few:
        after = Side(tl, change_step, min(change_step + REACH * window, ceiling), begins=change_step)
    rows = (
        Effect("step", "ms", estimated(before.seconds * 1e3), estimated(after.seconds * 1e3)),
        Effect("exposed communication", "ms", estimated(before.exposed * 1e3), estimated(after.exposed * 1e3)),
        Effect("sent per step and rank", "bytes", estimated(before.nbytes), estimated(after.nbytes)),
        Effect("loss slope", "per 100 steps", before.slope, after.slope, "95 % interval of the Theil-Sen slope"),
    )
    return Card(change_step, _said(tl, change_step), before.steps, after.steps, rows)


class Side:
    """One side of a change: a value per step, or per whole round where ranks meet every few steps.

    `begins` is a step at which a round is known to begin.
    """

    def __init__(self, tl: Timeline, first: int, stop: int, begins: int) -> None:
        self.steps = first, stop
        self.window = w = Window(tl, first, stop)
        c = lined_up(w)
        meetings = np.unique(c.step[c.full])
        periodic = 0 < len(meetings) < w.complete.sum() - 1
        self._rounds = _rounds(w, meetings, begins) if periodic else np.where(w.complete, w.steps, -1)
        good = ~_neighbours(w, _paused(tl) | set(change_steps(tl).tolist()))
        self._kept = _kept(self._rounds, good)
        self.few = len(self._kept) < FEWEST and (periodic or not len(meetings))
        rows = w.lane("comm")
        self.nbytes = self.each(w.total(rows, np.where(w.outside(rows), 0, rows.nbytes)))
        self.seconds, self.exposed = self.each(w.step_seconds), self.each(w.seconds("wait"))
        self.slope = _slope(*_losses(tl, first, stop))

    def each(self, values: np.ndarray) -> np.ndarray:
        """(n,) means of a (steps, ranks) matrix, one for each step or round that is looked at."""
        return np.array([values[self._rounds == k].mean() for k in self._kept])


def _rounds(w: Window, meetings: np.ndarray, begins: int) -> np.ndarray:
    """(steps,) the round that each step belongs to; -1 where it is not finished, or began before the window."""
    at = np.searchsorted(meetings, w.steps)
    whole = (at < len(meetings)) & ((at > 0) | (begins == w.first))
    rounds = np.where(whole, at, -1)
    broken = np.unique(rounds[~w.complete])
    return np.where(np.isin(rounds, broken), -1, rounds)


def _kept(rounds: np.ndarray, good: np.ndarray) -> np.ndarray:
    """The rounds without a disturbed step; all whole ones where that would leave too few."""
    every = np.unique(rounds[rounds >= 0])
    clean = np.setdiff1d(every, rounds[~good])
    return clean if len(clean) >= FEWEST else every


def _neighbours(w: Window, also: set[int]) -> np.ndarray:
    """A mask over steps: those at which a rank evaluated, handed over or measured, and those in `also`."""
    return w.disturbed | np.isin(w.steps, np.fromiter(also, np.int64, len(also)))


def _paused(tl: Timeline) -> set[int]:
    rows = tl.marks.rows()
    said = rows[rows.equal("name", "state")] if len(rows) else rows
    return {int(s) for s, d in zip(said.step, said.detail, strict=True) if json.loads(d).get("state") == "paused"}


def _said(tl: Timeline, step: int) -> str:
    rows = tl.marks.rows()
    rows = rows[rows.equal("name", "change") & (rows.step == step)] if len(rows) else rows
    details = [json.loads(d) for d in rows.detail]
    return ", ".join(d.get("text") or f"{d['path']} = {d['value']}" for d in details)


def _losses(tl: Timeline, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Training loss of each step, mean over ranks."""
    rows = tl.samples.rows()
    rows = rows[rows.equal("name", "loss") & (rows.step >= first) & (rows.step < stop)] if len(rows) else rows
    rows = rows[np.isfinite(rows.value)]
    steps, at, n = np.unique(rows.step, return_inverse=True, return_counts=True)
    return steps.astype(float), np.bincount(at, rows.value, minlength=len(steps)) / np.maximum(n, 1)


def estimated(values: np.ndarray) -> Estimate:
    """The median with a percentile bootstrap; the draws are the same each time."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return Estimate(float(values[0]) if n else float("nan"), float("nan"), float("nan"), n)
    drawn = np.median(values[np.random.default_rng(0).integers(0, n, (DRAWS, n))], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(np.median(values)), float(low), float(high), n)


def _slope(steps: np.ndarray, losses: np.ndarray) -> Estimate:
    """Theil-Sen: the median of all pairs' slopes, its interval from Kendall's variance (Sen, JASA 1968)."""
    n = len(steps)
    if n < 5:
        return Estimate(float("nan"), float("nan"), float("nan"), n)
    i, j = np.triu_indices(n, 1)
    slopes = np.sort(100 * (losses[j] - losses[i]) / (steps[j] - steps[i]))
    reach = 1.96 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = (len(slopes) - reach) / 2, (len(slopes) + reach) / 2
    at = np.clip([int(low), int(np.ceil(high))], 0, len(slopes) - 1)
    return Estimate(float(np.median(slopes)), float(slopes[at[0]]), float(slopes[at[1]]), n)
