"""Runs lesson 06: memory categories, ZeRO live on four real ranks, and a model that must fit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook

NOTED = """[seen, fit.check({}), fit.check({"strategy": "ZeRO2", "checkpoint": "units"}),
 fit.check({"strategy": "ZeRO3", "checkpoint": "units"}), fit.check({"batch": 1}), repr(worksheet("06"))]"""


def test_what_does_not_fit_is_made_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(kinds[0])", "bytes_sent = Prediction": "bytes_sent.choose(twice)",
            "worksheet(": NOTED}  # fmt: skip
    shown = texts("06_it_does_not_fit.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: parameters. The record says: optimizer state." in text for text in shown), shown
    assert any("The record says: as many." in text for text in shown), shown
    seen, refused, slower, best, fixed, sheet = eval(shown[-1])
    table = pd.DataFrame(seen).T.fillna(0)
    peaks = table["peak"]
    assert peaks["DDP"] > 1.2 * peaks["ZeRO1"] > 1.3 * peaks["ZeRO2"] > peaks["ZeRO3"] > peaks["ZeROInfinity"]
    assert table["optimizer state"]["ZeRO1"] == pytest.approx(table["optimizer state"]["DDP"] / 4, rel=0.05)
    assert 1.3 < table["sent"]["ZeRO3"] / table["sent"]["DDP"] <= 1.5
    assert table["on host"]["ZeROOffload"] > 0 and table["on disk"]["ZeROInfinity"] > 0
    assert table["activations"]["ZeRO3, units again"] < table["activations"]["ZeRO3"] / 4
    assert "activations" in refused and "needs" in refused
    assert slower.startswith("Not yet:") and best.startswith("Found:") and "cannot be changed here" in fixed
    assert "; solved" in sheet
