"""Executes the lessons from the first cell to the last with real ranks and without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import execute, results
from workbench.entrypoints.step_prediction import predict_step
from workbench.experiment.recipes import recipe

pytestmark = pytest.mark.notebook
LATE = """try:
    guess.choose(shows)
except ValueError as error:
    said = str(error)
said"""


TWO_WAYS = """from widgets.lesson import more_steps
for path, value in (("strategy", "DDP"), ("pace", 300), ("bandwidth", 60)):
    lab.set(path, value).wait(timeout=60)
more_steps(run, 12)
before = exercise.check()
for path, value in (("strategy", "LocalSGD"), ("every", 32)):
    lab.set(path, value).wait(timeout=60)
more_steps(run, 40)
lab.set("strategy", "DDP")
lab.set("compressor", "TopK").wait(timeout=60)
more_steps(run, 14)
before, exercise.check()"""


def test_the_first_run_goes_from_nothing_to_a_recorded_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = execute("01_first_run.ipynb", tmp_path, monkeypatch, **{"Hidden(run)": TWO_WAYS})
    first = next(c for c in book.cells if c.cell_type == "code")
    assert len(first.source.splitlines()) == 3
    assert "application/vnd.jupyter.widget-view+json" in first.outputs[-2].data
    assert 20_000 < len(first.outputs[-1].data["image/png"]) < 400_000  # the permanent picture, in base64
    shown = results(book)
    assert "strategy" in shown[1] and "applied at step" in shown[1]
    assert "every" in shown[2] and "applied at step" in shown[2]
    assert any("no way so far" in text or "on no wire" in text for text in shown if text), "the tour is no answer"
    assert any("Found: " in text and "strategy = LocalSGD" in text for text in shown if text), shown
    assert "'state': 'stopped'" in shown[-2] and "'changes': 9" in shown[-2]
    assert "3 tries, 0 hints; solved" in shown[-1]
    assert (tmp_path / "01_first_run.ipynb").stat().st_size < 1_000_000


def test_reading_a_timeline_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = "[riddle.check(r, 'victim') for r in range(4)], riddle.check(riddle._rank, 'cause'), riddle._rank"
    more = {"guess = Prediction": "guess.choose(hides)", "lab.run(slow)": LATE, "riddle.check": answers,
            "faster = Prediction": "faster.choose(often)"}  # fmt: skip
    book = execute("02_reading_a_timeline.ipynb", tmp_path, monkeypatch, **more)
    shown = [text for text in results(book) if text]
    assert any("The record says: much longer: most of the wire's time shows" in text for text in shown), shown
    assert any("the prediction is locked at" in text and "the run has begun" in text for text in shown), shown
    says = predict_step(recipe("slow_link").set("ranks", 4))
    asked = next(text for text in shown if "Prediction(" in text)
    assert f"computes for {says.compute} ms per step; the wire needs {says.wire} ms" in asked
    compared = eval(next(text for text in shown if "every 8 steps" in text))
    dense, less_often, less = (
        compared[k]["step"] for k in ("every step, everything", "every 8 steps", "every step, 1 %")
    )
    assert less_often < 0.7 * dense and less < 0.7 * dense
    assert any("You predicted: less often: LocalSGD. The record says: less" in text for text in shown), shown
    by_rank, as_cause, slow = eval(next(text for text in shown if "it arrives early" in text))
    assert [rank for rank, said in enumerate(by_rank) if said.startswith("Right, on both counts")] == [slow]
    assert sum("it arrives early" in said for said in by_rank) == 3 and "how can it be the cause?" in as_cause
    assert any("Write down your answers first" in text for text in shown)
    assert (tmp_path / "02_reading_a_timeline.ipynb").stat().st_size < 1_000_000


def test_one_strategy_two_clocks_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """[ratio, found.error, challenge.check({"strategy": "LocalSGD", "every": 32}),
 challenge.check({"ranks": 2}), again.summary()["changes"], run.summary()["changes"]]"""
    more = {"guess = Prediction": "guess.choose(same)", "challenge.check": answers,
            "best = Prediction": "best.choose(answers[0])"}  # fmt: skip
    book = execute("11_one_strategy_two_clocks.ipynb", tmp_path, monkeypatch, **more)
    shown = [text for text in results(book) if text]
    assert any("The record says: about twice as long" in text for text in shown), shown
    assert any("in 378 messages: 189 ms of latency per step" in text for text in shown), shown
    by_size = eval(next(text for text in shown if text.startswith("{0.3:")))
    assert by_size[2.0] < by_size[0.3], "fewer messages are faster on 64 ranks"
    assert any("You predicted: 0.3 MB. The record says:" in text for text in shown), shown
    losses = eval(next(text for text in shown if "real ranks" in text))
    assert losses["real ranks"] == pytest.approx(losses["simulated"], abs=2e-4)
    ratio, error, found, fixed, replayed, turned = eval(next(text for text in shown if "Found:" in text))
    assert 1.4 < ratio < 6 and abs(error) < 0.5
    assert found.startswith("Found:") and "cannot be changed here" in fixed
    assert replayed == turned == 1
    assert any(text.startswith("Not yet:") for text in shown)
