"""Turns of knobs without any engine: checked at once, answered later, never lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from workbench.cluster.turns import Turn, Turns, classes, planned
from workbench.experiment import Experiment
from workbench.settings import NEXT, Change, KnobError, to_plain
from workbench.strategies import DDP, LocalSGD


@dataclass(frozen=True, kw_only=True)
class OfTheNotebook(DDP):
    """A strategy that workbench does not ship."""


@pytest.fixture
def turns() -> Turns:
    return Turns(Experiment(ranks=2).checked(), [])


def ask(turns: Turns, path: str, value: Any) -> Turn:
    return turns.ask(path, value, lambda turn, new: None)


def applied(turns: Turns, turn: Turn, step: int) -> None:
    turns.applied(step, {"id": turn.id, "path": turn.path, "value": turn.value})


def test_a_turn_is_in_force_once_it_was_applied(turns: Turns) -> None:
    turn = ask(turns, "bucket_mb", 4)
    assert turns.experiment.bucket_mb == 1.0 and turn.applied_at is None
    applied(turns, turn, 12)
    assert turns.experiment.bucket_mb == 4.0 and turn.wait(0).applied_at == 12


def test_a_short_path_means_the_whole_one_and_the_value_is_plain(turns: Turns) -> None:
    turn = ask(turns, "strategy", "LocalSGD")
    assert turn.value == to_plain(LocalSGD())
    assert ask(turns, "every", 4).path == "strategy.every"


def test_a_refusal_is_an_error_when_waited_for(turns: Turns) -> None:
    turn = ask(turns, "lr", 0.5)
    turns.refused({"id": turn.id, "reason": "lr=0.5: not now"})
    with pytest.raises(KnobError, match="not now"):
        turn.wait(0)
    assert turns.experiment.lr != 0.5 and "refused: lr=0.5" in repr(turn)


def test_a_change_of_another_kernel_is_listed_too(turns: Turns) -> None:
    turns.applied(3, {"id": "somebody's", "path": "batch", "value": 4})
    assert [(t.path, t.applied_at) for t in turns.listed] == [("batch", 3)] and turns.experiment.batch == 4


def test_what_was_not_applied_is_refused_at_the_end(turns: Turns) -> None:
    turn = ask(turns, "batch", 4)
    turns.end("the run ended")
    assert turn.refused == "batch=4: the run ended"
    with pytest.raises(TimeoutError):
        Turn(Change(NEXT, "batch", 4, "1")).wait(0)


def test_a_turn_that_cannot_be_is_not_sent(turns: Turns) -> None:
    sent: list[Turn] = []
    for path, value, text in [("ranks", 3, "cannot change"), ("lr", "fast", "lr='fast'"), ("lrr", 1, "did you mean")]:
        with pytest.raises(KnobError, match=text):
            turns.ask(path, value, lambda turn, new: sent.append(turn))
    assert sent == [] == turns.listed


def test_classes_of_the_notebook_are_sent_along(turns: Turns) -> None:
    sent: list[type] = []
    turns.ask("strategy", OfTheNotebook(), lambda turn, new: sent.extend(new))
    assert sent == [OfTheNotebook] == list(classes(OfTheNotebook())) and not list(classes(DDP()))


def test_planned_changes_see_each_other() -> None:
    found = planned(Experiment(), [Change(9, "every", 2), Change(3, "strategy", "LocalSGD")])
    assert found == (Change(3, "strategy", to_plain(LocalSGD())), Change(9, "strategy.every", 2))
    for bad in (Change(-1, "lr", 1), Change(3, "every", 2), Change(3, "seed", 2)):
        with pytest.raises(KnobError):
            planned(Experiment(), [bad])
