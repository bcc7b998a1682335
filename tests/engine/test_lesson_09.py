"""Runs lesson 09: bytes by dimension, a cost model of a step next to the simulator, and a mesh of 4,096 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_a_cost_model_of_a_mesh_agrees_with_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = """[find.check(data=32, stages=16, slices=8), find.check(data=32, stages=32, slices=4),
        find.check(data=7, stages=8, slices=8), megabytes, {step: float((took.t1 - took.t0)[step]) for step in shapes},
        table.to_dict("index"), plans, seconds]"""
    more = {"guess = Prediction": 'guess.choose(names["data"])', "scale = Prediction": "scale.choose(eight)",
            "find.check": found}  # fmt: skip
    shown = texts("09_meshes.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: tensor: sums inside of layers." in s for s in shown), shown
    assert any("You predicted: nearly eight times. The record says: four to five times." in s for s in shown), shown
    assert any(s.startswith("Not yet: 3.") and "48 of 32 GB" in s for s in shown), shown
    solved = next(s for s in shown if "Found: " in s)
    slower, best, refused, megabytes, live, table, plans, seconds = eval(solved)
    assert slower.startswith("Not yet: ") and best.startswith("Found: ") and refused.startswith("4096 in all")
    assert megabytes["tensor"] > 10 * megabytes["stage"] > 20 * megabytes["data"]
    assert live[3] > 2 * live[1], "sixteen slices leave the machine"
    assert live[5] < live[3], "a longer bubble costs less than slow links"
    assert all(-0.12 < row["off by"] < 0 for row in table.values()) and (4096, 2, 8) in table
    assert set(plans.values()) == {(16, 8)}, "no layer is cut across machines"
    assert seconds[4096]["bubble"] == pytest.approx(seconds[512]["bubble"])
    assert seconds[4096]["compute"] == pytest.approx(seconds[512]["compute"] / 8)
