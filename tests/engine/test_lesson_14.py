"""Runs lesson 14: a shadow's examples per second do not depend on the link, but its loss does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook
FOUND = {"strategy": "ShadowMA"}


def test_never_waiting_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(half)", "loss = Prediction": "loss.choose(free)",
            "goal.check": f"[goal.check({FOUND}), seen, both, losses]"}  # fmt: skip
    shown = texts("14_never_wait.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: about half is kept. The record says: all of them are kept" in s for s in shown), shown
    assert any("The record says: higher on the slower wire" in s for s in shown), shown
    assert any(s.startswith("Not yet: ") for s in shown), shown
    _, seen, both, losses = eval(next(s for s in shown if "Found: " in s))
    assert {"LocalSGD", "ShadowMA", "ShadowEASGD", "AsyncModelAverage"} <= set(seen) and min(seen.values()) > 0, seen
    assert min(both[s]["second"] for s in ("ShadowMA", "ShadowEASGD")) > 1.5 * both["LocalSGD"]["second"], both
    assert all(both[s]["second"] > 0.98 * both[s]["first"] for s in ("ShadowMA", "ShadowBMUF", "ShadowEASGD"))
    assert both["LocalSGD"]["second"] < both["LocalSGD"]["first"] / 2
    assert losses["ShadowMA, second wire"] > 1.03 * losses["ShadowMA, first wire"]
    assert losses["LocalSGD(every=10), any wire"] < losses["ShadowMA, second wire"]
