"""Runs lesson 06: mixed precision and ZeRO on four real ranks, by formula and measured, and a calculator."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook

NOTED = """[seen, formula, found, predicted, fit.check("ZeRO3", "all", 17), fit.check("ZeRO3", "all", 15),
 fit.check("ZeRO3", "all", 16), fit.check("FSDP", "all", 16), repr(worksheet("06"))]"""


def test_formulas_of_memory_agree_with_what_ranks_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(half)", "bytes_sent = Prediction": "bytes_sent.choose(twice)",
            "worksheet(": NOTED}  # fmt: skip
    shown = texts("06_it_does_not_fit.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: half as large. The record says: the same." in text for text in shown), shown
    assert any("The record says: as many." in text for text in shown), shown
    (fits,) = [text for text in shown if "130 GB" in text]
    assert fits.count("fits") == 6 and "57 GB, fits" in fits
    seen, formula, found, predicted, wasteful, too_few, best, unknown, sheet = eval(shown[-1])

    both = pd.DataFrame(seen).T
    assert both["activations"]["32 bits"] == pytest.approx(2 * both["activations"]["mixed"], rel=0.05)
    assert both["sent"]["32 bits"] == pytest.approx(2 * both["sent"]["mixed"], rel=0.01)
    said, table = pd.DataFrame(formula).T / 1e6, pd.DataFrame(found).T.fillna(0)
    whole = {"DDP": ("parameters", "gradients"), "ZeRO1": ("parameters", "gradients"), "ZeRO2": ("parameters",)}
    for name in said.index:
        for kind in ("optimizer state", *whole.get(name, ())):
            assert table[kind][name] == pytest.approx(said[kind][name], abs=0.06), (name, kind)
    for name, kind in (("ZeRO2", "gradients"), ("ZeRO3", "gradients"), ("ZeRO3", "parameters")):
        assert said[kind][name] - 0.06 <= table[kind][name] <= table[kind]["DDP"], (name, kind)
    assert 1.3 < table["sent"]["ZeRO3"] / table["sent"]["DDP"] <= 1.5
    assert both["activations"]["mixed"] == pytest.approx(predicted["attention"], rel=0.05)
    assert both["activations"]["mixed"] < predicted["none"] / 1.15

    assert wasteful.startswith("It fits") and too_few.startswith("It does not fit: 80.0") and "one of" in unknown
    assert best == "It fits: 75.4 GB per device; 80.0 GB with one device fewer." and "; solved" in sheet
