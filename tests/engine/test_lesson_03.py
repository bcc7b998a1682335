"""Runs lesson 03: measured α and β predict a ring, and decide what more ranks or a faster wire change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook
SIZES = ("10 kB", "100 kB", "500 kB", "1000 kB")
# As the hints say: two times of 8 ranks, then 16 ranks.
SOLVED = """
short, long = (record(8, kb, hidden) for kb in (100, 2000))
slope = (long - short) / 1900 * 8 / 14  # ms per kB
start = short / 14 - 100 / 8 * slope
solution = {"latency": start, "bandwidth": 8 / slope, "mb": 9 * 16 * start / slope / 1e3}
[find.check(**{**solution, "mb": 2 * solution["mb"]}), find.check(**solution), {**solution},
 [list(map(float, fit(table))) for table in (at_first, fast)], at_first.to_dict(), fast.to_dict(), recorded,
 {f"{name} {rank}": x.flatten().tolist() for (name, rank), x in after.items()}]"""


def test_measured_alpha_and_beta_predict_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(both)", "faster = Prediction": "faster.choose(ten)",
            "find.check": SOLVED}  # fmt: skip
    shown = texts("03_collectives.ipynb", tmp_path, monkeypatch, **more)
    assert any("there is twice as much to add. The record says: the small one." in s for s in shown), shown
    assert any("You predicted: about ten times. The record says: less than twice." in s for s in shown), shown
    assert any("Not yet: latency, bandwidth, mb." in s for s in shown), shown
    wrong, right, solution, (slow, fast), at_first, _, recorded, after = eval(next(s for s in shown if "Right: " in s))
    assert wrong == "Not yet: mb." and right.startswith("Right: Link("), (wrong, right, solution)
    check_fits(slow, fast, at_first)
    check_record(recorded)
    check_collectives(after)


def check_fits(slow: list[float], fast: list[float], at_first: dict[str, Any]) -> None:
    """The settings are 10 ms and 100 Mbit/s, then 1000 Mbit/s. Real ranks on a busy machine take longer."""
    assert 9.5 < slow[0] < 15 and 80 < slow[1] < 120, slow
    assert 9.5 < fast[0] < 15 and 5 * slow[0] * slow[1] < fast[0] * fast[1], fast
    for size in SIZES:
        assert at_first["predicted"][size] == pytest.approx(at_first["all-reduce"][size], rel=0.25), at_first
        assert at_first["busbw"][size] == pytest.approx(1.5 * at_first["algbw"][size])
    assert at_first["busbw"]["10 kB"] < at_first["busbw"]["1000 kB"] / 10


def check_record(recorded: dict[int, list[float]]) -> None:
    """Checks the times of 2, 4, 8, 16 and 32 ranks against the formula."""
    for kb, took in recorded.items():
        for p, ms in zip((2, 4, 8, 16, 32), took, strict=True):
            assert ms == pytest.approx(2 * (p - 1) * (10 + 8 * kb / p / 100), rel=0.01)
    assert recorded[16_000][2] < 1.25 * recorded[16_000][1] and recorded[10][2] > 2 * recorded[10][1]


def check_collectives(after: dict[str, list[int]]) -> None:
    for rank in range(4):
        assert after[f"all-reduce {rank}"] == [1111, 2222, 3333, 4444]
        assert after[f"reduce-scatter {rank}"] == [1111 * (rank + 1)]
        assert after[f"all-gather {rank}"] == [1, 20, 300, 4000]
        assert after[f"broadcast {rank}"] == [1, 2, 3, 4]
        assert after[f"all-to-all {rank}"] == [(rank + 1) * 10**i for i in range(4)]
