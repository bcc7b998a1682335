"""Tests the rule for a clear difference: few false alarms, and real differences are found."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.analysis.compare.clear_difference import (
    MIN_RATIO_CHANGE,
    compare_values,
    draw_medians,
    estimate_median,
    rank_correlation,
    why_few,
)
from workbench.analysis.compare.trend import Trend, estimate_slope


def series(rng: np.random.Generator, n: int, alike: float, hiccups: float = 0.05) -> np.ndarray:
    """Returns durations of autocorrelated steps, some of them twice as long: (n,)."""
    noise, x = rng.standard_normal(n + 50), np.zeros(n + 50)
    for i in range(1, n + 50):
        x[i] = alike * x[i - 1] + noise[i] * np.sqrt(1 - alike**2)
    return 100 * np.exp(0.05 * x[50:]) * np.where(rng.random(n) < hiccups, 2, 1)


@pytest.mark.parametrize(("alike", "share"), [(0.0, 0.02), (0.3, 0.03), (0.6, 0.05), (0.8, 0.07)])
@pytest.mark.parametrize(("n", "m"), [(20, 20), (20, 50), (50, 50)])
def test_few_equal_series_are_called_different(n: int, m: int, alike: float, share: float) -> None:
    rng = np.random.default_rng(0)
    wrong = sum(compare_values(series(rng, n, alike), series(rng, m, alike)).clear for _ in range(200))
    assert wrong / 200 <= share


@pytest.mark.parametrize(("alike", "share"), [(0.0, 0.02), (0.3, 0.02), (0.5, 0.045), (0.8, 0.06)])
def test_few_flat_series_are_called_falling_or_rising(alike: float, share: float) -> None:
    rng, steps = np.random.default_rng(0), np.arange(20.0)
    wrong = sum(Trend(estimate_slope(steps, series(rng, 20, alike, 0.0)), "", 0).sign != 0 for _ in range(200))
    assert wrong / 200 <= share


def test_ten_per_cent_more_is_found_in_twenty_steps_with_the_right_sign() -> None:
    rng = np.random.default_rng(1)
    found = [compare_values(series(rng, 20, 0.0), 1.1 * series(rng, 20, 0.0)) for _ in range(100)]
    assert sum(r.more for r in found) > 80 and not any(r.less for r in found)
    assert all(r.low <= r.value <= r.high for r in found)


def test_swapping_the_series_mirrors_the_result() -> None:
    rng = np.random.default_rng(2)
    a, b = series(rng, 30, 0.2), 1.3 * series(rng, 40, 0.2)
    there, back = compare_values(a, b), compare_values(b, a)
    assert there.more and back.less and there.value * back.value == pytest.approx(1)


def test_a_certain_but_tiny_difference_is_not_clear() -> None:
    steady = np.full(30, 100.0)
    assert not compare_values(steady, steady * (1 + MIN_RATIO_CHANGE / 2)).clear
    assert compare_values(steady, steady * (1 + 2 * MIN_RATIO_CHANGE)).more
    assert (
        not compare_values(steady * 1e-3, steady * 2e-3, least=0.2).clear
        and compare_values(steady, 2 * steady, least=0.2).more
    )


def test_zero_equals_zero_and_differs_clearly_from_nonzero() -> None:
    nothing, some = np.zeros(30), np.full(30, 5.0)
    assert compare_values(nothing, nothing).value == 1 and not compare_values(nothing, nothing).clear
    assert compare_values(nothing, some).more and np.isinf(compare_values(nothing, some).value)
    assert compare_values(some, nothing).less and compare_values(some, nothing).value == 0


@pytest.mark.parametrize("values", [[], [1.0], [np.nan] * 30, [1.0, np.nan], [np.inf] * 5])
def test_too_few_values_give_no_verdict_and_no_error(values: list[float]) -> None:
    given, whole = np.array(values), np.full(30, 2.0)
    short = why_few(len(given), len(given), rounds=False)
    for r in (compare_values(given, whole, short), compare_values(whole, given, short)):
        assert not r.clear and (r.lacks or np.isnan(given).all())
    assert estimate_median(given).n == np.isfinite(given).sum()


def test_rounds_need_five_rounds_and_twenty_steps() -> None:
    assert why_few(4, 100, rounds=True) == "too short: 4 rounds; needs 5"
    assert why_few(5, 10, rounds=True) == "too short: 5 rounds; needs 10"
    assert why_few(10, 20, rounds=True) == why_few(20, 20, rounds=False) == ""
    assert why_few(1, 1, rounds=False) == "too short: 1 step; needs 20"
    assert why_few(0, 0, rounds=True) == "too short: 0 rounds; needs 5"
    assert why_few(12, 12, rounds=False, seen=25) == "too short: 25 steps, 12 of them undisturbed; needs 20"
    assert why_few(0, 0, rounds=False, seen=0) == "no steps" and why_few(20, 20, rounds=False, seen=25) == ""


def test_likeness_measures_autocorrelation_and_draws_are_repeatable() -> None:
    rng = np.random.default_rng(3)
    alone = [rank_correlation(series(rng, 200, 0.0)) for _ in range(20)]
    alike = [rank_correlation(series(rng, 200, 0.8, 0.0)) for _ in range(20)]
    assert np.mean(alone) < 0.1 and 0.7 < np.mean(alike) < 0.9
    assert rank_correlation(np.full(50, 3.0)) == 0.0 and rank_correlation(np.empty(0)) == 0.0
    values = series(rng, 30, 0.3)
    assert draw_medians(values).tolist() == draw_medians(values).tolist() != draw_medians(values, 1).tolist()
