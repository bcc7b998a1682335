"""Tests exercises: checks, hints one at a time, answers stored in the notebook, and handing in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest
from IPython.lib.pretty import pretty
from nbformat.v4 import new_code_cell, new_notebook, new_output

from widgets.lesson import Exercise, Goal, Hidden, Prediction, handed_in, worksheet
from widgets.teach import worksheet as sheets
from workbench import ByteGPT, Change, Digits, Experiment, KnobError, recipe, simulate


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sheets, "_done", {})
    yield


def halves() -> Exercise:
    return Exercise("half of four", lambda n: (n == 2, "Right." if n == 2 else "Not that."), ["even", "small"])


def done() -> sheets.Worksheet:
    """Returns a worksheet with one wrong prediction and an exercise solved at the second try with one hint."""
    guess = Prediction("How long?", ["short", "long"])
    guess.choose("short")
    guess.against("long")
    half = halves()
    half.check(3)
    half.hint()
    half.check(2)
    half.check(4)
    return worksheet("13 Talk less often")


def test_hints_come_one_at_a_time_and_tries_are_counted() -> None:
    text = repr(done())
    assert "half of four; 3 tries, 1 hint; solved" in text, "what was right once stays solved"
    assert "How long?; you said: short; the record: long" in text


def test_the_response_to_an_answer_is_displayed_as_a_sentence_and_is_a_string() -> None:
    said = Exercise("which?", lambda n: (False, f"Not {n}:\nit's odd.")).check(3)
    assert pretty(said) == "Not 3:\nit's odd." and pretty([said]) == repr([str(said)])
    assert said == "Not 3:\nit's odd." and repr(said) == repr(str(said))
    guess = Prediction("Longer?", ["yes", "no"])
    assert not pretty(guess.against("no")).startswith("'") and not pretty(guess.after(3)).startswith("'")
    guess.choose("yes")
    assert pretty(guess.against("no")).startswith("You predicted: yes.")
    assert pretty(halves().hint()) == "Hint 1 of 2: even"


def test_a_question_created_again_is_still_one_question() -> None:
    done()
    again = halves()
    assert "3 tries" in repr(worksheet("13"))
    again.check(1)
    assert repr(worksheet("13")).count("half of four; 4 tries, 1 hint; solved") == 1


def test_one_file_is_handed_in_and_can_be_read_by_the_teacher(tmp_path: Path) -> None:
    said = done().hand_in("Ada <Lovelace>", tmp_path)
    path = tmp_path / "13_talk_less_often-ada_lovelace.json"
    assert str(path) in said and path.stat().st_size < 2000
    (tmp_path / "other.json").write_text('["something else"]')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "strange.json").write_text(json.dumps({sheets.KEY: {"lesson": 5, "items": [1]}}))
    found = handed_in(tmp_path)
    assert list(found.student) == ["Ada <Lovelace>"] * 2 and list(found.right) == [False, True]
    asked = found[found.kind == "prediction"].iloc[0]
    assert (asked.said, asked.answer, asked.tries) == ("short", "long", 0)
    with pytest.raises(KnobError, match="must be your name"):
        done().hand_in(" ")


def test_the_notebook_stores_the_worksheet_too(tmp_path: Path) -> None:
    data, about = done()._repr_mimebundle_()
    output = new_output("execute_result", data, metadata=about, execution_count=1)
    earlier = new_output("execute_result", {"text/plain": ""}, execution_count=1,
                         metadata={sheets.KEY: {"lesson": "05 Talk less often", "items": []}})  # fmt: skip
    book = new_notebook(cells=[new_code_cell("worksheet(...)", outputs=[earlier]), new_code_cell("", outputs=[output])])
    nbformat.validate(book)
    nbformat.write(book, tmp_path / "ada.ipynb")
    found = handed_in(tmp_path)
    assert list(found.student) == ["ada", "ada"] and found[found.kind == "exercise"].tries.item() == 3
    assert "<table>" in data["text/html"] and len(json.dumps(about)) < 1000


def test_the_html_of_a_worksheet_escapes_markup(tmp_path: Path) -> None:
    Exercise("<script>alert(1)</script>", lambda: (True, ""))
    assert "<script>" not in worksheet("<b>")._repr_mimebundle_()[0]["text/html"].replace("<b>", "", 1)


def test_bytes_sent_early_in_the_run_count_too() -> None:
    """A summary's bytes cover the last fifty steps. A run that sends early and is quiet later has sent all the same."""
    small = recipe("digits").set("task", Digits(width=8, hidden=32)).set("ranks", 2).set("steps", 64).set("pace", 10)
    goal = Goal(small.set("eval_every", 64), "bytes_per_step", at_most=0.3, loss=9.0)
    said = goal.check({"strategy": "PostLocalSGD", "strategy.warmup": 16, "strategy.every": 48})
    assert said.startswith(f"Found: {100 * 17 / 64:.3g} % of the start's bytes per step"), said


def test_a_check_may_return_a_numpy_bool(tmp_path: Path) -> None:
    """A stored try becomes JSON in the notebook, and JSON has no NumPy types."""
    exercise = Exercise("more than a half?", lambda x: (np.float64(x) > 0.5, "said"))
    assert exercise.check(0.7) == "said"
    worksheet("15").hand_in("a", tmp_path)
    assert "true" in next(tmp_path.glob("*.json")).read_text()


def test_a_goal_is_judged_by_training_with_the_answer() -> None:
    start = recipe("digits").set("ranks", 2).set("steps", 12).set("pace", 10)
    goal = Goal(start, "bytes_per_step", at_most=0.3, loss=2.0)
    assert "fabric.link.bandwidth, ranks cannot be changed here" in goal.check({"fabric.link.bandwidth": 1, "ranks": 1})
    assert goal.check({"strategy": "LocalSDG"}).startswith("It cannot be trained: ")
    both = {"optimizer": "AdamW", "compressor": "DGC", "density": 0.1}
    freer = Goal(start, "bytes_per_step", at_most=0.3, may=("compressor", "optimizer", "lr"))
    assert freer.check(both).startswith("It cannot be trained: compressor=DGC: it keeps the momentum itself")
    task = ByteGPT(layers=1, width=16, heads=2, context=8)
    letters = Experiment(task=task, ranks=2, steps=12, pace=10, eval_every=12)
    wild = Goal(letters, "bytes_per_step", at_most=0.3, may=("optimizer", "lr"))
    assert wild.check({"optimizer": "SGD", "momentum": 0.9, "lr": 100}).startswith("Not yet: it diverges")
    assert goal.check({}).startswith("Not yet: 100 % of the start's bytes per step"), "the start itself"
    said = goal.check({"strategy": "LocalSGD", "every": 4})
    assert said.startswith("Found: 25 % of the start's bytes per step (limit 30 %), "), said
    less, was = goal.runs[-1].summary(), goal.base.summary()
    assert f"{less['held_out'] / was['held_out']:.3f} times its held-out loss" in said
    assert "4 tries" in repr(worksheet("13"))


CHANGES = (Change(12, "strategy", "LocalSGD"), Change(13, "strategy.every", 32), Change(60, "strategy", "DDP"),
           Change(61, "compressor", "TopK"), Change(80, "compressor", "Dense"))  # fmt: skip


def after(n: int, steps: int, bandwidth: float = 200) -> str:
    """Returns the answer to a run of so many steps with the first `n` changes."""
    e = recipe("first_run").set("fabric.link.bandwidth", bandwidth).set("eval_every", 0).set("steps", steps)
    return Hidden(simulate(e, changes=CHANGES[:n])).check()


def test_two_ways_to_hide_communication_must_be_two_different_settings() -> None:
    assert after(0, 12).startswith("Not yet: no way so far")
    assert after(2, 59).startswith("Not yet: one way so far (strategy = LocalSGD).")
    assert after(4, 66).startswith("Not yet: one way"), "five steps say little"
    assert after(5, 90) == "Found: strategy = LocalSGD; compressor = TopK."
    assert "Lower the bandwidth first" in after(5, 90, bandwidth=0), "where nothing was stalled nothing is hidden"
