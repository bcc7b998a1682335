"""Tests decisions of the second-order bench: end of tuning, best cell, and reached losses."""

from __future__ import annotations

import math

import pytest

from tests.bench import second_order as bench

Place = tuple[int, int]


def campaign(best: Place, method: str = "SGD") -> dict[str, list[tuple[int, float]]]:
    """Plays all runs if steps to the goal grow with the distance from `best`."""
    cells: dict[str, list[tuple[int, float]]] = {}
    while lacking := next(bench.wanted("Digits", method, cells), None):
        at, seed, steps = lacking
        name = bench.key("Digits", method, at, seed)
        assert name not in cells, "nothing is run twice"
        far = abs(at[0] - best[0]) + abs(at[1] - best[1])
        cells[name] = [(step, 0.1 if step >= 10 + 2 * far else 2.3) for step in range(0, steps + 1, 2)]
    return cells


@pytest.mark.parametrize("best", [(5, 3), (8, 1), (0, 0), (9, 6)])
def test_tuning_goes_on_until_all_neighbours_of_the_best_are_tried(best: Place) -> None:
    cells = campaign(best)
    assert bench.best_of("Digits", "SGD", cells) == best
    ladders = bench.METHODS["SGD"].ladders
    for i in (-1, 0, 1):
        for k in (-1, 0, 1):
            at = best[0] + i, best[1] + k
            if all(0 <= x < len(ladder) for x, ladder in zip(at, ladders, strict=True)):
                assert at in bench.tried("Digits", "SGD", cells)
    for seed in bench.SEEDS:
        assert bench.key("Digits", "SGD", best, seed) in cells
    assert not set(bench.SEEDS) & set(bench.TUNING)


def test_an_interrupted_campaign_continues_to_the_same_end() -> None:
    whole = campaign((7, 5))
    part = dict(list(whole.items())[:11])
    at, seed, _ = next(bench.wanted("Digits", "SGD", part))
    assert bench.key("Digits", "SGD", at, seed) == list(whole)[11]


def test_no_run_starts_that_could_not_be_the_best() -> None:
    cells = campaign((5, 3))
    longest = {name: found[-1][0] for name, found in cells.items()}
    assert longest[bench.key("Digits", "SGD", (5, 3), bench.SEEDS[0])] == bench.GOALS["Digits"].steps
    assert longest[bench.key("Digits", "SGD", (6, 4), bench.TUNING[0])] == 10, "no longer than the best so far"
    assert bench.key("Digits", "SGD", (6, 4), bench.TUNING[1]) not in cells


def test_the_worse_of_two_seeds_counts_and_nan_is_the_worst() -> None:
    good, slow, lost = [(0, 2.3), (10, 0.1)], [(0, 2.3), (10, 0.2), (20, 0.15)], [(0, 2.3), (10, math.nan)]
    assert bench.reached("Digits", good) == 10 and bench.reached("Digits", slow) == 20
    assert bench.reached("Digits", lost) == math.inf
    assert bench.score("Digits", [good, slow]) == (20, 0.15)
    assert bench.score("Digits", [good, lost]) == (math.inf, math.inf)
    assert bench.score("Digits", [good, slow]) < bench.score("Digits", [good, lost])


def test_bytes_are_averaged_over_whole_periods() -> None:
    """KFAC sends in addition to SGD the factors every fifth step and the inverses every tenth."""
    sgd, kfac = (bench.nbytes("Digits", m, (0, 0)) for m in ("SGD", "KFAC"))
    half = sum(n * (n + 1) // 2 for n in (1025, 384, 385, 10))  # of the two Linear layers, with biases
    factors = 4 * 2 * 3 / 4 * half / 5
    assert sgd + factors <= kfac <= sgd + factors + 4 * 3 * half / 10
