"""When is a difference clear? One rule, for the cards of changes and for what compression saves.

The ratio of two medians with its interval, by bootstrap over steps. Neighbouring steps are alike (a busy machine stays
busy for a while), so n steps tell as much as n' independent ones, and the draws are spread about their median by

    sqrt(n / n') (1 + 1.5 / n'),     n' = n (1 - r) / (1 + r)

more. r is the correlation of a step's rank with the next one's, freed of its bias in short series, -(1 + 3r) / n; the
last factor is there because few values know their own spread badly. Of two equal series of 20 steps with r = 0.8 one
pair in 25 is called different, of those with r = 0.3 or less one in a hundred (`tests/unit/test_clear.py`).

A difference is clear if the 99 % interval of the ratio does not hold 1, the ratio is not within `WORTH` of 1, and both
sides have enough steps. 99 % and not 95: a session has dozens of such questions, and one in twenty would be answered
wrongly. Of nothing against nothing the ratio is 1.

References: Efron, "Bootstrap methods", Ann. Statist. 1979; n' of a series that forgets geometrically: Bartlett, JRSS B
1946; the bias of r: Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 1954.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DRAWS = 800
LEAST_STEPS = 20  # on either side, before a verdict is given
LEAST_ROUNDS = 5  # the same where whole rounds are compared
WORTH = 0.01  # of the ratio: less is not worth a word, however sure
MOST = 0.9  # that r is taken for


class Estimate(NamedTuple):
    """A number with its 95 % interval (a slope: 99 %), from `n` values; NaN where there are too few."""

    value: float
    low: float
    high: float
    n: int


class Ratio(NamedTuple):
    """The median after over the median before, with its 99 % interval; NaN where a side has no value.

    clear:  it differs from 1 beyond doubt, and by enough to be worth a word
    lacks:  why no verdict is given yet, in words; "" where one is
    """

    value: float
    low: float
    high: float
    clear: bool
    lacks: str = ""

    @property
    def more(self) -> bool:
        """Clearly more after than before."""
        return self.clear and self.value > 1

    @property
    def less(self) -> bool:
        """Clearly less after than before."""
        return self.clear and self.value < 1


def compared(before: np.ndarray, after: np.ndarray, lacks: str = "", least: float = 0.0) -> Ratio:
    """(n,) values of steps, or of rounds, before against (m,) after.

    lacks: why no verdict may be given, or ""; least: a difference of the medians up to this is not worth a word
    """
    before, after = (values[np.isfinite(values)] for values in (before, after))
    if not len(before) or not len(after):
        return Ratio(float("nan"), float("nan"), float("nan"), False, lacks or "nothing is known of one side")
    was, now = float(np.median(before)), float(np.median(after))
    value = float(_over(now, was))
    if lacks:
        return Ratio(value, float("nan"), float("nan"), False, lacks)
    low, high = np.quantile(_over(drawn(after, 1), drawn(before, 0)), [0.005, 0.995], method="nearest")
    clear = (low > 1 or high < 1) and not 1 - WORTH < value < 1 + WORTH and abs(now - was) > least
    return Ratio(value, float(low), float(high), bool(clear))


def estimated(values: np.ndarray) -> Estimate:
    """The median of (n,) values with a percentile bootstrap over steps; the draws are the same each time."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return Estimate(float(values[0]) if n else float("nan"), float("nan"), float("nan"), n)
    low, high = np.quantile(drawn(values), [0.025, 0.975])
    return Estimate(float(np.median(values)), float(low), float(high), n)


def drawn(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """(DRAWS,) medians of what might as well have been seen in place of (n,) consecutive values."""
    n, middle = len(values), np.median(values)
    every = np.median(values[np.random.default_rng(seed).integers(0, n, (DRAWS, n))], axis=1)
    r = likeness(values)
    alone = max(3.0, n * (1 - r) / (1 + r))
    return np.asarray(middle + (every - middle) * np.sqrt(max(1.0, n / alone)) * (1 + 1.5 / alone))


def likeness(values: np.ndarray) -> float:
    """The correlation r of a value's rank with the next one's, 0 to `MOST`; of ranks, so that hiccups count little."""
    n = len(values)
    rank = np.unique(values, return_inverse=True)[1].astype(float)
    rank -= rank.mean() if n else 0.0
    whole = float(rank @ rank)
    if n < 4 or not whole:
        return 0.0
    r = float(rank[1:] @ rank[:-1]) / whole
    return float(np.clip(r + (1 + 3 * r) / n, 0.0, MOST)) if r > 0.1 else 0.0


def lacking(n: int, steps: int, *, rounds: bool, seen: int | None = None) -> str:
    """Why `n` values, of `steps` steps in all, are too few for a verdict; "" where they are enough.

    rounds: the values are of rounds, not of steps; seen: how many there are, with those that are left out

    >>> lacking(2, 2, rounds=False), lacking(3, 24, rounds=True)
    ('too short: 2 steps; needs 20', 'too short: 3 rounds; needs 5')
    >>> lacking(0, 0, rounds=False, seen=2)
    'too short: 2 steps, 0 of them undisturbed; needs 20'
    """
    needed = LEAST_STEPS
    if rounds:
        needed = max(LEAST_ROUNDS, -(-LEAST_STEPS * n // steps)) if steps else LEAST_ROUNDS
    if n >= needed:
        return ""
    if seen == 0:
        return "no steps"
    some = f", {n} of them undisturbed" if seen is not None and seen != n else ""
    return f"too short: {_many(n if seen is None else seen, 'round' if rounds else 'step')}{some}; needs {needed}"


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _over(after: np.ndarray | float, before: np.ndarray | float) -> np.ndarray:
    """after / before; infinite over nothing, and 1 where both are nothing."""
    after, before = np.asarray(after, float), np.asarray(before, float)
    endless = np.full(np.broadcast_shapes(after.shape, before.shape), np.inf)
    out = np.divide(after, before, out=endless, where=before > 0)
    return np.where((after <= 0) & (before <= 0), 1.0, out)
