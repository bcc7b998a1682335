"""Tests lessons: predictions lock at the right time, and no dashboard reveals a riddle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.sim.virtual import paced
from widgets.charts.feed import Feed
from widgets.controls.controls import Controls
from widgets.controls.transport import Transport
from widgets.lesson import FACTOR, Prediction, Riddle, priced
from widgets.page.dashboard import Dashboard
from widgets.teach.said import ShownText
from widgets.views import all_views
from workbench import recipe, simulate
from workbench.fabric import Link
from workbench.run import Run

ANSWERS = ["short", "long"]


class BareLab:
    """The part of a lab that a prediction uses."""

    def __init__(self, run_now: Any = None, live: bool = False) -> None:
        self.run_now, self.live = run_now, live


class BareRun:
    pass


class StillLab:
    """A lab that simulates its runs at once; `run` is the call of a riddle."""

    ranks, live, state, progress, notes, status = 4, False, "idle", "ready", (), ()
    members = (0, 1, 2, 3)

    def __init__(self) -> None:
        self.experiment = recipe("one_slow_rank")
        self.run_now: Any = None
        self.changes: list[Any] = []
        self.asked: list[Any] = []
        self.watchers: list[Any] = []

    def run(self, experiment: Any, secret: str = "") -> Run:
        self.experiment = experiment.set("steps", 30).set("eval_every", 0)
        self.run_now = simulate(self.experiment)
        self.run_now.secret = secret
        return self.run_now

    def set(self, path: str, value: Any) -> Any:
        self.asked.append((path, value))
        return SimpleNamespace(path=path, value=value)


def riddle() -> tuple[StillLab, Riddle]:
    lab = StillLab()
    return lab, Riddle(lab, recipe("one_slow_rank").set("pace", 150), seed=1)


def told(feed: Feed) -> str:
    """Returns the new text of a board's text views."""
    message = feed.make_news()
    views = message[0]["views"] if message else {}
    return " ".join(str(view.get("html") or "") for view in views.values())


# -- predictions


def test_without_a_guess_no_answer_is_shown() -> None:
    guess = Prediction("How long?", ANSWERS)
    for _ in range(2):
        said = guess.against("long")
        assert "long" not in said and "Predict first" in said
        assert "long" not in guess.told.value and not guess.radio.disabled
    guess.choose("short")
    assert guess.against("long").startswith("You predicted: short. The record says: long.")


def test_a_sentence_is_shown_alike_in_a_page_and_in_a_terminal() -> None:
    from IPython.core.formatters import DisplayFormatter

    shown, _ = DisplayFormatter().format(ShownText("1 < 2, said Tom's\nteacher"))
    assert shown == {"text/plain": "1 < 2, said Tom's\nteacher", "text/html": "1 &lt; 2, said Tom's<br>teacher"}


def test_a_guess_cannot_be_changed_once_the_answer_is_shown() -> None:
    guess = Prediction("How long?", ANSWERS)
    guess.choose("short")
    guess.choose("long")  # still allowed
    shown = guess.against("long")
    assert "As you said." in shown and guess.radio.disabled
    assert "As you said." not in guess.told.value, "once is enough: the cell shows it"
    assert "Your prediction stands: long." in guess.told.value
    guess.radio.value = "short"  # as a page that does not know of the lock would do
    assert guess.radio.value == guess.said == "long"
    assert guess.against("long") == shown


def test_a_guess_cannot_be_changed_once_the_run_has_begun() -> None:
    lab = BareLab(run_now=None, live=False)
    guess = Prediction("How long?", ANSWERS, lab)
    guess.radio.value = "short"
    lab.run_now = BareRun()
    guess.radio.value = "long"
    assert (guess.radio.value, guess.said) == ("short", "short")
    assert "stays" in guess.told.value and "the run has begun" in guess.told.value
    with pytest.raises(ValueError, match="locked at 'short', since the run has begun"):
        guess.choose("long")


def test_a_guess_after_the_runs_start_is_marked() -> None:
    lab = BareLab(run_now=None, live=False)
    guess = Prediction("How long?", ANSWERS, lab)
    lab.run_now = BareRun()
    guess.choose("long")
    assert guess.against("long").startswith("You predicted (when the run had begun): long.")
    beside = Prediction("How long?", ANSWERS, BareLab(run_now=BareRun(), live=True))
    beside.choose("long")
    assert "when the run had begun" in beside.against("long")


def test_an_earlier_run_of_the_lab_locks_nothing() -> None:
    guess = Prediction("How long?", ANSWERS, BareLab(run_now=BareRun(), live=False))
    guess.choose("short")
    guess.choose("long")
    assert guess.said == "long" and not guess.locked


def test_rerunning_the_cell_keeps_the_guess_and_its_lock() -> None:
    lab = BareLab()
    Prediction("How long?", ANSWERS, lab).choose("short")
    lab.run_now, lab.live = BareRun(), True
    lab.live = False  # the run has ended and would look like an earlier one
    again = Prediction("How long?", ANSWERS, lab)
    assert (again.said, again.radio.value) == ("short", "short") and "short" in again.told.value
    with pytest.raises(ValueError, match="locked at 'short', since the run has begun"):
        again.choose("long")
    again.against("long")
    assert Prediction("How long?", ANSWERS, lab).locked == "the answer has been shown"
    assert Prediction("And now?", ANSWERS, lab).said is Prediction("How long?", ANSWERS, BareLab()).said is None


def test_a_question_within_a_run_is_locked_by_its_answer_only() -> None:
    lab = BareLab(run_now=BareRun(), live=True)
    guess = Prediction("Which is faster?", ANSWERS, lab, during=True)
    guess.choose("short")
    guess.choose("long")
    assert guess.against("long").startswith("You predicted: long.")
    again = Prediction("Which is faster?", ANSWERS, lab, during=True)
    assert again.said == "long" and again.locked and again.radio.disabled


# -- the riddle


def test_no_dashboard_reveals_a_riddle_before_the_answer() -> None:
    _, asked = riddle()
    feed = Feed(asked.run)
    before = told(feed)
    assert asked.run.secret in before and f"Rank {asked._rank} is" not in before
    assert told(feed) == "", "said once"
    right = asked.check(asked._rank, "victim")
    assert right.startswith("Right, on both counts.") and not asked.run.secret
    assert f"Rank {asked._rank} is the cause" in told(feed)


def test_a_wrong_answer_keeps_the_riddle_and_giving_up_ends_it() -> None:
    _, asked = riddle()
    for rank in range(4):
        said = asked.check(rank, "cause")
        assert not said.startswith("Right") and asked.run.secret
    assert f"Rank {asked._rank} was the cause" in asked.give_up() and f"{FACTOR:g}" in asked.give_up()
    assert f"Rank {asked._rank} is the cause" in told(Feed(asked.run))


def test_views_that_name_causes_are_the_silent_ones() -> None:
    views = [kind for kind in all_views().values() if kind.__module__.startswith("widgets.")]  # without views of tests
    judging = {kind.name for kind in views if kind.tells}
    assert judging == {"straggler", "cards", "causes", "lateness", "entered", "path"}
    _, asked = riddle()
    for kind in views:
        if not kind.tells:
            assert "is the cause" not in str(kind().update(asked.run).html)


def test_controls_neither_show_nor_accept_faults_in_a_riddle() -> None:
    lab, asked = riddle()
    controls = Controls(lab)
    assert not [r for r in controls.rows if "faults.0" in r["path"]]
    controls.handle_message({"press": "fabric.faults.inject"})
    assert "riddle" in str(controls.errors) and not lab.asked
    asked.give_up()
    controls.refresh()
    assert [r for r in controls.rows if "faults.0" in r["path"] or str(asked._rank) in str(r.get("value"))]


def test_no_button_of_the_transport_reveals_a_riddle() -> None:
    lab, asked = riddle()
    bar, sent = Transport(lab), []
    bar.send = sent.append
    for press in ("copy", "start"):  # both would show the fault: as code, or as a run that hides nothing
        bar.handle_button(press)
        assert "riddle.give_up()" in bar.error["text"] and lab.run_now is asked.run and not sent
    asked.give_up()
    bar.handle_button("copy")
    assert "Slow" in sent[0]["python"] and not bar.error


def test_an_open_dashboard_follows_the_riddle_silently() -> None:
    lab = StillLab()
    lab.run(recipe("one_slow_rank"))
    above = Dashboard(lab)
    asked = Riddle(lab, recipe("one_slow_rank").set("pace", 150), seed=1)
    above.refresh()
    assert above.board.run is asked.run
    assert f"Rank {asked._rank} is" not in told(Feed(above.board.run))
    assert not [r for r in above.handles[1].rows if "faults.0" in r["path"]]
    above.close()


def test_a_riddle_may_ask_for_the_phase() -> None:
    asked = Riddle(StillLab(), recipe("one_slow_rank").set("pace", 150), seed=1, asks="phase")
    assert asked.check(rank=asked._rank) == "Write down your answers first: rank=..., phase='forward' or 'backward'."
    (other,) = {"forward", "backward"} - {asked._phase}
    assert f"its {other} takes as long as on the other ranks" in asked.check(asked._rank, phase=other)
    assert "a victim" in asked.check((asked._rank + 1) % 4, phase=asked._phase) and asked.run.secret
    assert asked.check(asked._rank, phase=asked._phase).startswith("Right, on both counts") and not asked.run.secret


# -- numbers


def test_a_lessons_price_of_a_recipe_matches_its_description() -> None:
    said = priced(recipe("slow_link"))
    assert said.compute == recipe("slow_link").pace
    link = recipe("slow_link").fabric.link
    assert said.wire == pytest.approx(1e3 * link.seconds(said.sent * 1e6, said.messages), rel=0.02)
    assert said.messages % 6 == 0, "around a ring of four"


def test_a_price_follows_the_experiment() -> None:
    e = paced(4, pace=80.0, mbit=100.0)
    plain = priced(e)
    half = priced(e.set("fabric.link", Link(bandwidth=50.0)))
    assert plain.compute == 80 and half.wire == pytest.approx(2 * plain.wire, abs=1) and half.sent == plain.sent
