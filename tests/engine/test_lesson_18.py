"""Runs lesson 18: low-rank factors pay on a slow link but not on a fast one; a formula gives break-even."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_send_its_shape_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """{"tries": [exercise.check(k * 8e-6 * (sent.dense - sent.sent) / whole) for k in (0.5, 1.0, 2.0)],
 "wires": wires, "sent": {how: found["bytes_per_step"] for how, found in rows.items()}}"""
    more = {"guess = Prediction": "guess.choose(shorter)", "thin = Prediction": "thin.choose(same)",
            "exercise.check(": answers}  # fmt: skip
    shown = texts("18_send_its_shape.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: clearly shorter. The record says: " in text and "A surprise" in text for text in shown)
    assert any("The record says: in the first steps" in text for text in shown), shown
    told = eval(next(text for text in shown if "'tries': " in text))
    assert [said.partition(":")[0] for said in told["tries"]] == ["Not yet", "Found", "Not yet"], told["tries"]
    slow = told["wires"][40.0]
    assert slow["PowerSGD"] < 0.8 * slow["Dense"]
    assert told["sent"]["Zen"] < 0.1 * told["sent"]["Dense"]
