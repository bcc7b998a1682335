"""Runs lesson 21: up to which batch size twice the batch halves the steps, and what helps beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook
TRIES = (
    "batch=32, optimizer=TaskOwn(), lr=0.02",
    "batch=32, strategy=kfac, lr=0.1",
    "batch=16, optimizer=TaskOwn(), lr=0.02",
    "batch=32, clip=1.0, lr=0.4",
    "pace=3",
    "batch=32, lr=-1",
    "batch=0",
    "batch=8, lr=0.1, **{'strategy.accumulate': 4}",
)


def test_large_batches_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ", ".join(f"(exercise.check({answer}), worksheet('15').items[-1].get('right'))" for answer in TRIES)
    more = {"guess = Prediction": "guess.choose(everywhere)", "rescue = Prediction": "rescue.choose(both)",
            "exercise.check": f"[[{asked}], tried]",
            "lab.stop()": "[took, shares, rescued, large, ends, live, before, after]"}  # fmt: skip
    shown = texts("21_large_batches.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: only at first; then hardly fewer. A surprise" in s for s in shown), shown
    assert any("The record says: clipping alone. A surprise" in s for s in shown), shown
    found = eval(next(s for s in shown if s.startswith("[{8: {0.025")), {"nan": float("nan")})
    took, shares, rescued, large, ends, live, before, after = found
    fewest = {size: min(n for n in row.values() if n) for size, row in took.items()}
    assert min(took[8], key=lambda rate: took[8][rate] or 999) == 0.025 and took[8][0.1] is None, took
    assert 8 * fewest[8] < 1.5 * 16 * fewest[16] < 16 * fewest[8], fewest  # about as many images, far fewer steps
    assert shares["8 to 16"] < 0.7 < 0.9 < shares["64 to 256"], shares
    assert any(s == "{'64 images, rate 0.2': None, '256 images, rate 0.8': None}" for s in shown), shown
    assert rescued["warm-up"] is None and rescued["clipping"] < 0.75 * fewest[256], rescued
    least = {name: min(n for n in row.values() if n) for name, row in large.items()}
    assert least["Adam"] < least["LAMB"] < 0.75 * fewest[256] and least["K-FAC"] < fewest[256], least
    assert least["LARS"] > 0.75 * fewest[256], least  # as the lesson states: no fewer than SGD
    assert ends["LARS"][64] is None or ends["LARS"][256] < 0.75 * ends["LARS"][64], ends  # but still gaining
    assert 0.75 < ends["K-FAC"][256] / ends["K-FAC"][64] < 1.35, ends
    rates, kB = zip(*((row["learning rate"], row["kB per image"]) for row in live.values()), strict=True)
    assert list(live) == [8, 16, 64] and rates == (0.025, 0.05, 0.2), live
    assert kB[0] == pytest.approx(2 * kB[1], rel=0.02) and kB[0] == pytest.approx(8 * kB[2], rel=0.02), live
    assert after["kB per step"] > 2 * before["kB per step"], (before, after)
    tries, tried = eval(next(s for s in shown if s.startswith("[[('45 steps of 32 images")))
    assert [bool(right) for _, right in tries][:2] == [True, True], tries
    assert set(tried) == {16, 32} and tried[32] < 0.286 < 2 * tried[32], tried
    assert tries[4][0] == "pace cannot be changed here.", tries
    assert tries[5][0].startswith("It cannot be trained: lr=-1"), tries
    assert tries[6][0].startswith("It cannot be trained: "), tries
    assert tries[7][0].startswith("45 steps of 32 images: 1."), tries  # accumulated images count
    assert any(s.startswith("45 steps of 32 images: 1.") for s in shown), shown  # the rule alone does not suffice
