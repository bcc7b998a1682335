"""Runs lesson 17: few bits suffice, a biased codec diverges without error feedback, noise costs bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_send_it_coarsely_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = "QSGD(bits=4), QSGD(bits=3, block=8192), QSGD(bits=2, block=64), QSGD(bits=3)"
    answers = f"""{{"tries": [exercise.check(c) for c in ({tries})], "found": found, "live": live,
  "signs": (more["1"], remembered)}}"""
    more = {"guess = Prediction": "guess.choose('16')", "arrives = Prediction": "arrives.choose(slower)",
            "exercise.check(": answers}  # fmt: skip
    shown = texts("17_send_it_coarsely.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: 16. The record says: 4." in text for text in shown), shown
    assert any("The record says: no, it diverges" in text for text in shown), shown
    told = eval(next(text for text in shown if "'tries': " in text))
    assert [said.partition(":")[0] for said in told["tries"]] == ["Not yet"] * 3 + ["Found"], told["tries"]
    assert told["live"]["Dense"]["bits"] == 32 and 4 <= told["live"]["QSGD"]["bits"] < 4.2
    assert told["live"]["OneBitAdam"]["bits"] < 1.2
    assert told["signs"][0] > 1.1 > 1.05 > told["signs"][1]
    assert told["found"]["largest"] > 10 > 0.2 > told["found"]["largest, rest kept"]
    levels = eval(next(text for text in shown if "'NUQSGD, l2'" in text))
    assert levels["QSGD, l2"][8192] > 4 * levels["AMQ, l2"][8192] and levels["QSGD, max"][64] < levels["NUQSGD, l2"][64]
