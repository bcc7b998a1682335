"""The rule for a clear difference.

The ratio of 2 medians gets an interval by bootstrap over steps. A busy machine stays busy, so neighbouring steps are
alike. Then n steps count as n' independent ones. The draws' distances from their median grow by

    sqrt(n / n') (1 + 1.5 / n'),     n' = n (1 - r) / (1 + r)

r is the correlation of neighbouring steps' ranks. It is corrected for its bias in short series, -(1 + 3r) / n. The last
factor corrects for the uncertain spread of few values. The rule calls 4 % of pairs of equal series of 20 steps
different with r = 0.8. With r = 0.3 or less it calls 1 % different (`tests/unit/test_clear.py`).

A difference is clear under 3 conditions. The ratio's 99 % interval excludes 1. The ratio is not within
`MIN_RATIO_CHANGE` of 1. Both sides have enough steps. 95 % intervals would fail in 5 % of a user's dozens of
comparisons. 0 to 0 counts as 1.

References: Efron, "Bootstrap methods", Ann. Statist. 1979. n' of a first-order autoregressive series: Bartlett, JRSS B
1946. The bias of r: Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 1954.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DRAWS = 800
MIN_STEPS = 20  # steps per side for a verdict
MIN_ROUNDS = 5  # the same for whole rounds
MIN_RATIO_CHANGE = 0.01  # the ratio's least distance from 1 that matters
MAX_CORRELATION = 0.9  # upper limit of r


class Estimate(NamedTuple):
    """A number from `n` values with its 95 % interval (a slope: 99 %). NaN if n is too small."""

    value: float
    low: float
    high: float
    n: int


class Ratio(NamedTuple):
    """The median after over before, with its 99 % interval. NaN without values.

    clear: whether it differs clearly from 1
    lacks: why there is no verdict, or ""
    """

    value: float
    low: float
    high: float
    clear: bool
    lacks: str = ""

    @property
    def more(self) -> bool:
        return self.clear and self.value > 1

    @property
    def less(self) -> bool:
        return self.clear and self.value < 1


def compare_values(before: np.ndarray, after: np.ndarray, lacks: str = "", least: float = 0.0) -> Ratio:
    """Compares `(n,)` values of steps or rounds before with `(m,)` after.

    lacks: why no verdict is possible, or ""
    least: the least difference of the medians that matters
    """
    before, after = (values[np.isfinite(values)] for values in (before, after))
    if not len(before) or not len(after):
        return Ratio(float("nan"), float("nan"), float("nan"), False, lacks or "one side has no values")
    was, now = float(np.median(before)), float(np.median(after))
    value = float(_divide_values(now, was))
    if lacks:
        return Ratio(value, float("nan"), float("nan"), False, lacks)
    low, high = np.quantile(
        _divide_values(draw_medians(after, 1), draw_medians(before, 0)), [0.005, 0.995], method="nearest"
    )
    clear = (low > 1 or high < 1) and not 1 - MIN_RATIO_CHANGE < value < 1 + MIN_RATIO_CHANGE and abs(now - was) > least
    return Ratio(value, float(low), float(high), bool(clear))


def estimate_median(values: np.ndarray) -> Estimate:
    """The median of `(n,)` values, bootstrapped reproducibly."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return Estimate(float(values[0]) if n else float("nan"), float("nan"), float("nan"), n)
    low, high = np.quantile(draw_medians(values), [0.025, 0.975])
    return Estimate(float(np.median(values)), float(low), float(high), n)


def draw_medians(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """`(DRAWS,)` medians of resampled values, as for `(n,)` consecutive steps."""
    n, middle = len(values), np.median(values)
    every = np.median(values[np.random.default_rng(seed).integers(0, n, (DRAWS, n))], axis=1)
    r = rank_correlation(values)
    alone = max(3.0, n * (1 - r) / (1 + r))
    return np.asarray(middle + (every - middle) * np.sqrt(max(1.0, n / alone)) * (1 + 1.5 / alone))


def rank_correlation(values: np.ndarray) -> float:
    """Correlation r of neighbouring values' ranks, 0 to `MAX_CORRELATION`."""
    n = len(values)
    rank = np.unique(values, return_inverse=True)[1].astype(float)
    rank -= rank.mean() if n else 0.0
    whole = float(rank @ rank)
    if n < 4 or not whole:
        return 0.0
    r = float(rank[1:] @ rank[:-1]) / whole
    return float(np.clip(r + (1 + 3 * r) / n, 0.0, MAX_CORRELATION)) if r > 0.1 else 0.0


def why_few(n: int, steps: int, *, rounds: bool, seen: int | None = None) -> str:
    """Returns why `n` values of `steps` steps are too few for a verdict, or "".

    rounds: whether the values are of rounds
    seen:   the number of values with the excluded ones

    >>> why_few(2, 2, rounds=False), why_few(3, 24, rounds=True)
    ('too short: 2 steps; needs 20', 'too short: 3 rounds; needs 5')
    >>> why_few(0, 0, rounds=False, seen=2)
    'too short: 2 steps, 0 of them undisturbed; needs 20'
    """
    needed = MIN_STEPS
    if rounds:
        needed = max(MIN_ROUNDS, -(-MIN_STEPS * n // steps)) if steps else MIN_ROUNDS
    if n >= needed:
        return ""
    if seen == 0:
        return "no steps"
    some = f", {n} of them undisturbed" if seen is not None and seen != n else ""
    return f"too short: {_count_noun(n if seen is None else seen, 'round' if rounds else 'step')}{some}; needs {needed}"


def _count_noun(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _divide_values(after: np.ndarray | float, before: np.ndarray | float) -> np.ndarray:
    """Returns after / before. Infinite if only `before` is 0. 1 if both are 0."""
    after, before = np.asarray(after, float), np.asarray(before, float)
    endless = np.full(np.broadcast_shapes(after.shape, before.shape), np.inf)
    out = np.divide(after, before, out=endless, where=before > 0)
    return np.where((after <= 0) & (before <= 0), 1.0, out)
