"""Runs lesson 23: skewed data costs accuracy with local steps; fewer clients at a time come closer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_ranks_that_are_not_yours_show_what_they_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = "fewer_clients.check(share=0.25), fewer_clients.check(share=0.25, bits=8), sent, base, clients, others"
    more = {"guess = Prediction": "guess.choose(skew)", "half = Prediction": "half.choose(worse)",
            "fewer_clients.check": tries}  # fmt: skip
    shown = texts("23_ranks_you_do_not_own.ipynb", tmp_path, monkeypatch, **more)
    record = "You predicted: skew alone: DDP on skewed data. The record says: skew with local steps"
    assert any(record in s for s in shown), shown
    assert any("You predicted: lower. The record says: higher" in s for s in shown), shown
    dense, found, sent, base, clients, others = eval(next(s for s in shown if "Found: " in s))
    assert dense.startswith("Not yet: ") and found.startswith("Found: ")
    assert set(sent) == {"LocalSGD", "BoundedStaleness", "TEASQFed", "AsyncDrop"}
    alike, skewed = base["alike"], base["skewed"]
    for alone in (skewed["every step"], alike["local steps"], alike["stale"]):
        assert abs(alike["every step"] - alone) < 3
    assert alike["every step"] - skewed["local steps"] > 6
    assert skewed["stale"] < skewed["local steps"]
    assert clients[0.25] > clients[1.0] + 3 and others["AsyncServer"] < clients[0.25]
