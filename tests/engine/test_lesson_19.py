"""Runs lesson 19: the fastest all-reduce by size and by distance between sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_rings_trees_and_sites_show_what_they_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = 'a="HalvingDoubling", b="ParameterServer", c="Ring", d="HalvingDoubling"'
    more = {"guess = Prediction": "guess.choose(both)", "sites = Prediction": "sites.choose(both_are)",
            "choose.check": f"[choose.check({right}), took, found, apart, crossings]"}  # fmt: skip
    shown = texts("19_rings_trees_sites.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: for both. The record says: for the large one alone" in s for s in shown), shown
    assert any("You predicted: both. The record says: Hierarchical alone" in s for s in shown), shown
    assert any("Not the first: a, b, d." in s for s in shown), shown
    _solved, took, found, apart, crossings = eval(next(s for s in shown if "Right, all four" in s))
    assert set(took) == {"Native", *found} and all(ms["exposed"] > 0 for ms in took.values())
    assert found["Ring"]["large"] < 0.7 * min(ms["large"] for name, ms in found.items() if name != "Ring")
    assert found["HalvingDoubling"]["small"] < 0.8 * found["Ring"]["small"]
    for ms in apart.values():
        assert min(ms, key=ms.get) == "Hierarchical"
        assert sorted(ms, key=ms.get)[1] == ("Ring" if ms is apart["near, large"] else "TwoLevel")
    assert apart["far, large"]["TwoLevel"] < apart["far, large"]["Ring"]
    at_20_ms, at_2_ms = crossings[6]
    assert 5 < at_20_ms / at_2_ms < 20, "ten times the latency, ten times the size"
    assert all(crossings[7]) and crossings[8] == crossings[16] == [None, None]
    compressed = eval(next(s for s in shown if "compressed between sites" in s and "whole" in s))
    assert compressed["compressed between sites"] < compressed["whole"] / 1.5
    assert compressed["whole"] < compressed["compressed by every rank"]
