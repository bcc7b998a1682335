"""Runs lesson 15: traffic of a ring of four, latency hidden by gossip, the exponential graph's exact mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook
# The same comparison on a virtual clock, which a busy machine does not disturb.
VIRTUAL = """[
 where_time_goes(simulate(start.set("steps", 12).set("eval_every", 0).set("strategy", s)), last=8)["exposed"]
 for s in (DDP(), Gossip())]"""


def test_neighbours_only_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 'draw.check(ring_of_8 + " 0-4 1-5 2-6 3-7"), draw.check(ring_of_8 + " 0-4 1-5 2-6 3-7 0-2"), took, losses'
    more = {"guess = Prediction": "guess.choose(half)", "graph = Prediction": "graph.choose(less_left)",
            "draw.check": f"{tries}, {VIRTUAL}"}  # fmt: skip
    shown = texts("15_neighbours_only.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: half as many bytes. The record says: a third more bytes" in s for s in shown), shown
    assert any("The record says: on the exponential graph nothing at all" in s for s in shown), shown
    assert any("Not yet: a gap of 0.195 with 8 pairs" in s for s in shown), shown
    found, too_many, took, losses, exposed = eval(next(s for s in shown if "Found: a gap of 0.5 with 12 pairs" in s))
    assert found.startswith("Found") and too_many.startswith("Not yet") and "13 pairs" in too_many
    assert took["exponential"]["kB sent"] < took["DDP"]["kB sent"] < took["ring"]["kB sent"]
    assert took["low precision"]["kB sent"] < took["ring"]["kB sent"] / 3
    assert exposed[1] < exposed[0] / 2, "neighbours are waited for while one computes"
    slow = eval(next(s for s in shown if "'20 ms'" in s))
    assert slow["DDP"]["20 ms"] > 3 * slow["ring"]["20 ms"] and slow["ring"]["20 ms"] < 1.1 * slow["ring"]["0.2 ms"]
    assert all(1 < loss / losses["DDP"] < 1.1 for name, loss in losses.items() if name != "DDP")
