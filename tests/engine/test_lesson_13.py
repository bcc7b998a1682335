"""Runs lesson 13: the cost of eight local steps, and why an outer momentum needs a common start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook
FOUND = {"strategy": "StreamingDiLoCo", "strategy.every": 2, "strategy.fragments": 1, "strategy.outer_lr": 1.0,
         "strategy.outer_momentum": 0.0}  # fmt: skip
# The same comparison on a virtual clock, which a busy machine does not disturb.
VIRTUAL = """[where_time_goes(simulate(start.set("steps", 17).set("strategy", s)), last=16)["exposed"]
 for s in (DDP(), LocalSGD(every=H))]"""


def test_talking_less_often_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(much)", "cold = Prediction": "cold.choose(gain)",
            "warm = Prediction": "warm.choose(far)",
            "goal.check": f"[goal.check({FOUND}), took, losses, warmed, {VIRTUAL}]"}  # fmt: skip
    shown = texts("13_talk_less_often.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: more than 25 per cent higher. The record says: less than 5 per cent" in s for s in shown)
    assert any("The record says: higher: momentum does harm here" in s for s in shown), shown
    assert any("The record says: much closer to DDP's" in s for s in shown), shown
    assert any("Not yet: 12.5 % of the start's bytes per step" in s for s in shown), shown
    found = next(s for s in shown if "Found: 6.45 % of the start's bytes per step" in s)
    _, took, losses, warmed, exposed = eval(found)
    assert exposed[1] < exposed[0] / 2
    assert set(took) == {"DDP", "LocalSGD", "SlowMo", "BMUF", "DiLoCo", "StreamingDiLoCo"}
    cold = losses["DiLoCo(every=8)"] / losses["DDP"]
    assert losses["LocalSGD(every=8)"] / losses["DDP"] < 1.05 < cold
    assert warmed["DiLoCo"] / warmed["DDP"] - 1 < (cold - 1) / 2 and warmed["LocalSGD"] < warmed["DiLoCo"]
    bursts = eval(next(s for s in shown if "'most'" in s))
    assert bursts["StreamingDiLoCo"]["most"] < bursts["DiLoCo"]["most"] / 4
