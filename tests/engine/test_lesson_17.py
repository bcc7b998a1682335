"""Lesson 17: skew costs more than staleness, and fewer clients at a time come closer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_ranks_that_are_not_yours_show_what_they_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = "fewer_clients.check(share=0.25), fewer_clients.check(share=0.25, bits=8), sent, base, clients, others"
    more = {"guess = Prediction": "guess.choose(stale_more)", "half = Prediction": "half.choose(worse)",
            "fewer_clients.check": tries}  # fmt: skip
    shown = texts("17_ranks_you_do_not_own.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: staleness costs more. The record says: skew costs more" in s for s in shown), shown
    assert any("You predicted: lower. The record says: higher" in s for s in shown), shown
    dense, found, sent, base, clients, others = eval(next(s for s in shown if "Found: " in s))
    assert dense.startswith("Not yet: ") and found.startswith("Found: ")
    assert set(sent) == {"LocalSGD", "BoundedStaleness", "TEASQFed", "AsyncDrop"}
    alike, skewed = base["alike"], base["skewed"]
    assert alike["waiting"] - alike["stale"] < 3 < 6 < alike["waiting"] - skewed["waiting"]
    assert skewed["stale"] < skewed["waiting"]
    assert clients[0.25] > clients[1.0] + 3 and others["AsyncServer"] < clients[0.25]
