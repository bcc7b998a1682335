"""Runs lesson 10: what a killed replica and a killed shard cost, and how often to save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lessons import texts

TRIES = """lab.set("save_every", 3).wait(timeout=60)
more_steps(run, 10)
after(lambda: lab.kill(lab.members[-1]))
[exercise.check()]"""
INTERVALS = """{"tries": [interval.check(minutes=m) for m in (24 * 60, 22, 45, 90)]}"""
LAW = """{"law": {n: [float(x) for x in (best[n], young(C, M / n), min(shares[n]), (2 * C * n / M) ** 0.5,
                          *(lost_share(x * young(C, M / n), C, lives / n) for x in (2, 0.5)))] for n in best},
 "rules": [[float(lost_share(rule(c * M, M), c * M, lives)) for rule in (young, daly)] for c in (0.005, 0.05, 0.5, 1)],
 "captions": [daly(5, m) for m in (24 * 60, 6 * 60, 15)]}"""


@pytest.mark.notebook
def test_when_one_dies_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(everything)", "shards = Prediction": "shards.choose(same)",
            "often = Prediction": "often.choose(fourfold)", "def young(": LAW,
            "interval.check(": INTERVALS, "exercise = Exercise": TRIES}  # fmt: skip
    shown = texts("10_when_one_dies.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: none: at most the unfinished step" in text for text in shown), shown
    assert any("; progress: ranks 0, 1, 3 before step" in text for text in shown), shown
    assert any("The record says: those since the checkpoint: about 20, or more" in text for text in shown), shown
    assert any("rank 1 was preempted and left" in text and "added" in text for text in shown), shown
    lost = [int(n) for text in shown for n in re.findall(r"(\d+) steps? (?:is|are) lost", text)]
    assert max(lost) >= 15, "twenty were waited for, from where the kernel knew all ranks: a little earlier"
    assert any("2 tries, 0 hints; solved" in text and "5 tries, 0 hints; solved" in text for text in shown), shown
    assert any("You predicted: four times as often. The record says: twice as often" in text for text in shown), shown
    tries = eval(next(text for text in shown if "'tries'" in text))["tries"]
    wasted = [float(re.match(r"[\d.]+", said)[0]) for said in tries]  # type: ignore[index]
    assert wasted[0] > 70 and wasted[2] < 9 < min(wasted[1], wasted[3]) < 12, tries
    check_law(eval(next(text for text in shown if "'law'" in text)))
    cost = eval(next(text for text in shown if "'copy and write'" in text))
    assert 0 < cost["copy"]["milliseconds"] < cost["copy and write"]["milliseconds"], cost


def check_law(found: dict) -> None:
    """Compares simulated lives with Young's and Daly's intervals."""
    for n, (best, young, least, formula, twice, half) in found["law"].items():
        assert best == pytest.approx(young, rel=0.15), n
        assert least == pytest.approx(formula, rel=0.1) and least < formula, n
        assert max(twice, half) < 1.3 * least, n
    assert found["law"][4][2] == pytest.approx(2 * found["law"][1][2], rel=0.06)
    assert all(daly <= young + 1e-3 for young, daly in found["rules"]), found
    assert found["rules"][-1][0] - found["rules"][-1][1] > 0.01, "a save as long as a life"
    assert found["captions"] == pytest.approx([117, 57, 9.1], rel=0.01), "minutes, captions of Daly's figures 3 to 5"
