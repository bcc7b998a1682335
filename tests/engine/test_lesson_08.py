"""Runs lesson 08: one all-reduce for two matrices, sequence parallelism, and no layer across two sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook


def test_a_layer_on_two_ranks_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = "[mesh.check(Tensor(ways=8)), mesh.check(Tensor(ways=4)), took, over, inside]"
    more = {"guess = Prediction": "guess.choose(twice)", "sequence = Prediction": "sequence.choose(less)",
            "cross = Prediction": "cross.choose(half)", "mesh.check": found}  # fmt: skip
    shown = texts("08_one_layer_on_two_ranks.ipynb", tmp_path, monkeypatch, **more)
    apart = eval(next(s for s in shown if "columns, then rows" in s))
    assert apart["columns, then rows"] < 1e-5 and apart["rows, then columns"] > 0.1
    assert any("You predicted: twice: after each of the two matrices. The record says: once" in s for s in shown), shown
    assert any("The record says: less memory is taken, and no fewer bytes are sent" in s for s in shown), shown
    assert any("You predicted: half as many, or more. The record says: less than a fifth" in s for s in shown), shown
    assert any(s.startswith("memory_mb=16: rank 0 needs") for s in shown), "the whole model does not fit"
    wrong, right, took, over, inside = eval(next(s for s in shown if "Found: " in s and "Not yet: " in s))
    assert wrong.startswith(f"Not yet: {over}") and right.startswith("Found: ")
    assert took["in two"]["parameters"] < 0.55 * took["whole"]["parameters"]
    assert took["in two, by positions"]["activations"] < 0.85 * took["in two"]["activations"]
    assert over < inside / 5
