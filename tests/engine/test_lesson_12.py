"""Runs lesson 12: one slow rank delays all; bounded staleness only helps against occasional slow steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook
PHASES = ("forward", "backward")
# The same comparison on a virtual clock, which a busy machine does not disturb.
VIRTUAL = """{type(s).__name__:
 simulate(start.set("faults", (now_and_then,)).set("strategy", s)).summary()["examples_per_second"]
 for s in (DDP(), BackupWorkers(backup=1), BoundedStaleness(bound=3), AsyncServer(), Hogwild())}"""


def test_the_slow_one_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    riddled = f"[riddle.check(r, phase=p) for r in range(4) for p in {PHASES}], riddle._rank, riddle._phase"
    told = "[which.check(*(), a=x, b=y) for x, y in (order, order[::-1])]"
    more = {"guess = Prediction": "guess.choose(list(answers)[0])", "helps = Prediction": "helps.choose(both)",
            "riddle.check": riddled, "which.check": told,
            "losses |=": f"[rates, gained, losses, {VIRTUAL}]"}  # fmt: skip
    shown = texts("12_the_slow_one.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: 2.4 times as long: one slow rank is enough" in s for s in shown), shown
    assert any("The record says: only against random slow steps" in s for s in shown), shown
    live, gained, losses, rates = eval(next(s for s in shown if s.startswith("[{'DDP'")))
    assert set(live) == set(rates) and min(live.values()) > 0, live
    assert max(rates, key=rates.get) != "DDP" and rates["AsyncServer"] > 1.15 * rates["DDP"], rates
    assert gained["SSP"]["now and then"] > 1.2 > 1.05 > gained["SSP, four times the bound"]["always"]
    assert gained["backup workers"]["now and then"] > 1.15 and gained["backup workers"]["always"] > 2
    assert losses["backup workers"] < 0.97 * losses["DDP"] and losses["Hogwild!"] < losses["DDP"]
    said, rank, phase = eval(next(s for s in shown if "Right, on both counts" in s))
    right = [i for i, text in enumerate(said) if text.startswith("Right, on both counts")]
    assert right == [2 * rank + PHASES.index(phase)]
    assert any(s.startswith("['Right.', 'Not so: ") for s in shown), shown
