"""Runs lesson 07: the bubble matches the formula; 1F1B saves memory, not time; other schedules trade."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lessons import texts

TRIES = """[exercise.check(schedule="ZeroBubble", micros=16), exercise.check(micros=5), exercise.check(stages=2),
 gpipe.share, one.share, gpipe.in_flight.tolist(), one.in_flight.tolist()]"""


@pytest.mark.notebook
def test_in_stages_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(answers[none])", "turn = Prediction": "turn.choose(smaller)",
            "exercise = Exercise": TRIES}  # fmt: skip
    shown = texts("07_in_stages.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: hardly: stages overlap. The record says: about 43%: (p-1) / (m+p" in t for t in shown)
    assert any("The record says: the memory shrinks: fewer micro-batches in flight." in text for text in shown), shown
    right, wrong, fixed, gpipe, one, kept, fewer = eval(next(t for t in shown if "stages cannot be set here" in t))
    assert gpipe > 0.35 and abs(gpipe - one) < 0.1 and (kept, fewer) == ([4, 4, 4, 4], [4, 3, 2, 1])
    assert right.startswith("Stages are idle for 13 %") and "micros=5" in wrong and "stages cannot" in fixed
    table = next(text for text in shown if "PipeDream2BW" in text and "kB sent" in text)
    rows = {line.split()[0]: line for line in table.splitlines()[1:]}
    idle = {name: int(re.findall(r"(\d+)%", row)[0]) for name, row in rows.items()}
    assert idle["ZeroBubble"] < idle["Interleaved"] < idle["OneFOneB"] == idle["GPipe"]
    assert int(rows["Interleaved"].split()[-1]) > 2 * int(rows["OneFOneB"].split()[-1])
    assert any("4 tries, 0 hints; solved" in text for text in shown)
