"""The effect of a change, up to the next one."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis.compare import comparable_steps as sides
from workbench.analysis.compare.clear_difference import Estimate, Ratio, compare_values, estimate_median
from workbench.analysis.compare.comparable_steps import WINDOW_STEPS, Side
from workbench.analysis.compare.trend import Trend, find_trend
from workbench.analysis.steps.window import change_steps, last_steps
from workbench.record.marks import once
from workbench.record.timeline import Timeline

MIN_DIFFERENCE_MS = 0.1  # ms: smaller differences do not matter


class Effect(NamedTuple):
    """One row of the card: a quantity before and after.

    change: after over before. A slope has only `clear` and `lacks`
    trends: the loss's slopes before and after
    """

    name: str
    unit: str
    before: Estimate
    after: Estimate
    change: Ratio
    spread: str = "95 % bootstrap interval of the median; of the ratio 99 %"
    trends: tuple[Trend, Trend] | None = None

    @property
    def ratio(self) -> float:
        return self.change.value

    @property
    def verdict(self) -> str:
        """Returns "more", "less" or "same" (no clear change). "" if unknown (see `change.lacks`)."""
        if self.change.lacks:
            return ""
        if not self.change.clear:
            return "same"
        return "more" if self.after.value > self.before.value else "less"


class Card(NamedTuple):
    """The effect of the change before step `step`.

    nbytes, seconds: cost of the change for all ranks; 0 in an old record
    """

    step: int
    text: str
    before: tuple[int, int]  # [first, stop) of the analysed steps
    after: tuple[int, int]
    rows: tuple[Effect, ...]
    nbytes: int = 0
    seconds: float = 0.0


def before_after(tl: Timeline, change_step: int, window: int = WINDOW_STEPS) -> Card:
    """Compares step, exposed communication, bytes and loss slope over `window` steps per side."""
    every = change_steps(tl)
    floor = int(max([s for s in every if s < change_step], default=0))
    ceiling = int(min([s for s in every if s > change_step], default=last_steps(tl)[1]))
    ceiling = max(min(ceiling, last_steps(tl)[1]), change_step)
    was, now = sides.side_before(tl, change_step, floor, window), sides.side_after(tl, change_step, ceiling, window)
    rows = (
        _make_effect("step", "ms", was, now, was.seconds * 1e3, now.seconds * 1e3),
        _make_effect("exposed communication", "ms", was, now, was.exposed * 1e3, now.exposed * 1e3),
        _make_effect("sent per step and rank", "bytes", was, now, was.nbytes, now.nbytes),
        _compare_slopes(find_trend(tl, was), find_trend(tl, now)),
    )
    made = _list_changes(tl, change_step)
    nbytes, seconds = (sum(d.get(name, 0) for d in made) for name in ("nbytes", "seconds"))
    return Card(change_step, _describe_changes(made), was.steps, now.steps, rows, nbytes, seconds)


def why_lacking(was: Side, now: Side) -> str:
    """Returns why a change has no verdict, or ""."""
    return _join_reasons(was.lacks, now.lacks)


def _join_reasons(before: str, after: str) -> str:
    return ". ".join(f"{name}: {lacks}" for name, lacks in (("Before", before), ("After", after)) if lacks)


def _make_effect(name: str, unit: str, was: Side, now: Side, before: np.ndarray, after: np.ndarray) -> Effect:
    least = MIN_DIFFERENCE_MS if unit == "ms" else 0.0
    change = compare_values(before, after, why_lacking(was, now), least)
    return Effect(name, unit, estimate_median(before), estimate_median(after), change)


def _compare_slopes(was: Trend, now: Trend) -> Effect:
    """Slopes differ if their 99 % intervals do not overlap."""
    a, b = was.slope, now.slope
    differ = a.high < b.low or b.high < a.low
    change = Ratio(float("nan"), float("nan"), float("nan"), differ, _join_reasons(was.lacks, now.lacks))
    return Effect("loss slope", "per 100 steps", a, b, change, "99 % interval of the Theil-Sen slope", (was, now))


def _list_changes(tl: Timeline, step: int) -> list[dict[str, Any]]:
    rows = tl.marks.rows()
    rows = rows[rows.equal("name", "change") & (rows.step == step)] if len(rows) else rows
    said = [json.loads(d) for d in rows.detail]
    return [d for d, counts in zip(said, once(said), strict=True) if counts]


def _describe_changes(details: list[dict[str, Any]]) -> str:
    texts = [(d.get("text") or f"{d['path']} = {d['value']}", d.get("by"), d.get("reason")) for d in details]
    return ", ".join(f"{text} (by {by}: {why})" if by else text for text, by, why in texts)
