"""Whether the loss falls or rises: its slope over some steps.

The slope is the Theil-Sen estimator, the median of all pairs' slopes. Its interval comes from Kendall's variance (Sen,
JASA 1968). It is wider if neighbouring residuals are alike (see `compare.clear_difference`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.compare.clear_difference import Estimate, rank_correlation, why_few
from workbench.analysis.compare.comparable_steps import Side
from workbench.record.timeline import Timeline

MAX_POINTS = 400  # points that form pairs
SLOPE_STEPS = 100  # steps
NEVER = "never finite"
NOTHING = Estimate(float("nan"), float("nan"), float("nan"), 0)


class Trend(NamedTuple):
    """The loss's slope per 100 steps with its 99 % interval.

    lacks: why there is no verdict, or ""
    odd:   number of excluded steps without a finite loss
    """

    slope: Estimate
    lacks: str
    odd: int

    @property
    def sign(self) -> int:
        """1 if the loss clearly rises, -1 if it falls, else 0."""
        if self.lacks:
            return 0
        return int(self.slope.low > 0) - int(self.slope.high < 0)

    def __str__(self) -> str:
        odd = f"not finite in {self.odd} step{'s' * (self.odd != 1)}" if self.odd and self.lacks != NEVER else ""
        return "; ".join(part for part in (odd, self.lacks or _describe_slope(self.slope, self.sign)) if part)


def find_trend(tl: Timeline, side: Side) -> Trend:
    """The mean training loss's trend in settled steps."""
    w = side.window
    rows = tl.samples.rows()
    within = (rows.step >= w.first) & (rows.step < w.stop)
    rates = rows.step[within & rows.equal("name", "lr")] if len(rows) else np.empty(0, np.int64)
    rows = rows[within & rows.equal("name", "loss")] if len(rows) else rows
    finite = np.isfinite(rows.value)
    odd = len(np.unique(rows.step[~finite]))
    steps, at, many = np.unique(rows.step[finite], return_inverse=True, return_counts=True)
    losses = np.bincount(at, rows.value[finite], minlength=len(steps)) / np.maximum(many, 1)
    risen = int(rates.max(initial=w.first))  # ranks record the rate only when it changes
    fit = np.isin(steps, w.steps[side.settled]) & (steps >= risen) & ~np.isin(steps, rows.step[~finite])
    if w.first < risen == w.stop - 1:
        return Trend(NOTHING, "waits: the learning rate still changes", odd)
    if not len(rows):
        return Trend(NOTHING, "no loss on the record", 0)
    if not finite.any():
        return Trend(NOTHING, NEVER, odd)
    n = int(fit.sum())
    lacks = why_few(n, n, rounds=False, seen=len(np.unique(rows.step)))
    return Trend(NOTHING if lacks else estimate_slope(steps[fit].astype(float), losses[fit]), lacks, odd)


def estimate_slope(steps: np.ndarray, losses: np.ndarray) -> Estimate:
    """Returns the Theil-Sen slope of `(n,)` losses per `SLOPE_STEPS` steps with its 99 % interval. NaN if n < 5."""
    n = len(steps)
    if n < 5:
        return NOTHING._replace(n=n)
    if n > MAX_POINTS:
        even = np.linspace(0, n - 1, MAX_POINTS).astype(int)
        return estimate_slope(steps[even], losses[even])._replace(n=n)
    i, j = np.triu_indices(n, 1)
    slopes = np.sort(SLOPE_STEPS * (losses[j] - losses[i]) / (steps[j] - steps[i]))
    middle = float(np.median(slopes))
    r = rank_correlation(losses - middle / SLOPE_STEPS * steps)
    alone = max(3.0, n * (1 - r) / (1 + r))  # corrects for the uncertain r
    reach = 2.576 * (1 + 1.5 / alone) * np.sqrt(n * (n - 1) * (2 * n + 5) / 18 * (1 + r) / (1 - r))
    low, high = (len(slopes) - reach) / 2, (len(slopes) + reach) / 2
    at = np.clip([int(low), int(np.ceil(high))], 0, len(slopes) - 1)
    return Estimate(middle, float(slopes[at[0]]), float(slopes[at[1]]), n)


def _describe_slope(e: Estimate, sign: int) -> str:
    """The slope in words.

    >>> _describe_slope(Estimate(-0.264, -0.439, -0.069, 50), -1)
    'falls by 0.264 per 100 steps [0.069, 0.439]'
    >>> _describe_slope(Estimate(0.01, -0.02, 0.04, 50), 0)
    'no clear trend: +0.01 per 100 steps [-0.02, +0.04]'
    """
    if not sign:
        if e.low == e.high == 0:
            return "does not change"
        return f"no clear trend: {e.value:+.3g} per {SLOPE_STEPS} steps [{e.low:+.3g}, {e.high:+.3g}]"
    low, high = sorted((abs(e.low), abs(e.high)))
    return f"{'rises' if sign > 0 else 'falls'} by {abs(e.value):.3g} per {SLOPE_STEPS} steps [{low:.3g}, {high:.3g}]"
