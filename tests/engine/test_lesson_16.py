"""Runs lesson 16: late gradients are not lost with SGD but hurt momentum; 1 % of the bytes suffices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_send_the_largest_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """{"with momentum": goal.check({"compressor": ErrorFeedback(of=TopK(density=0.005)), "lr": 0.1}),
 "before": goal.check({"compressor": DGC(density=0.005)}), "losses": (sgd, momentum, adam), "times": times}"""
    more = {"guess = Prediction": "guess.choose(much)", "felt = Prediction": "felt.choose(still)",
            "scales = Prediction": "scales.choose(answers[0])", "goal.check(": answers}  # fmt: skip
    shown = texts("16_send_the_largest.ipynb", tmp_path, monkeypatch, **more)
    print(*shown, sep="\n")
    assert any("You predicted: much" in text and "The record says: nothing visible" in text for text in shown)
    assert any("The record says: it costs now" in text for text in shown), shown
    assert any("The record says: much smaller: hardly fewer bytes than all." in text for text in shown), shown
    live = eval(next(text for text in shown if "left unsent" in text))
    assert live["largest entries"] < live["milliseconds per step, everything sent"]
    assert live["relative error of the sum"] > 0.1 and live["left unsent, in gradients"] > 0.2
    told = eval(next(text for text in shown if "'before': " in text))
    assert told["with momentum"].startswith("Not yet: 1 %") and told["before"].startswith("Found: 1")
    sgd, momentum, adam = told["losses"]
    assert sgd["rest thrown away"] > 1.06 * sgd["all"]
    assert momentum["DGC"] < momentum["rest kept"]
    assert adam[0.9]["rest kept"] / adam[0.9]["all"] > adam[0.0]["rest kept"] / adam[0.0]["all"]
    assert told["times"]["TopK"][64] < 3 < 5 < min(told["times"][how][64] for how in ("GTopK", "OkTopK"))
