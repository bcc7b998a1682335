"""Runs lesson 10: a killed replica costs no finished step, a killed shard the steps since the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lessons import texts

TRIES = """lab.set("save_every", 3).wait(timeout=60)
more_steps(run, 10)
after(lambda: lab.kill(lab.members[-1]))
[exercise.check()]"""


@pytest.mark.notebook
def test_when_one_dies_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(everything)", "shards = Prediction": "shards.choose(same)",
            "exercise = Exercise": TRIES}  # fmt: skip
    shown = texts("10_when_one_dies.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: none: at most the unfinished step" in text for text in shown), shown
    assert any("; progress: ranks 0, 1, 3 before step" in text for text in shown), shown
    assert any("The record says: those since the checkpoint: about 20, or more" in text for text in shown), shown
    assert any("rank 1 was preempted and left" in text and "added" in text for text in shown), shown
    lost = [int(n) for text in shown for n in re.findall(r"(\d+) steps? (?:is|are) lost", text)]
    assert max(lost) >= 15, "twenty were waited for, from where the kernel knew all ranks: a little earlier"
    assert any("2 tries, 0 hints; solved" in text for text in shown), shown
    same, other = eval(next(text for text in shown if "'from step'" in text)).values()
    assert same["from step"] == other["from step"] > 0 and same["losses"][0] == other["losses"][0], (same, other)
    assert same["losses"] != other["losses"], (same, other)
