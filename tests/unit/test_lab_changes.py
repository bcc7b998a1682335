"""Tests changes without engines: checked at once, answered later, never lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from workbench.cluster.run.run_changes import BEFORE_RUN, Changes, PendingChange, list_foreign_classes
from workbench.experiment import Experiment, user_input
from workbench.lab import Lab
from workbench.settings import NEXT, Change, KnobError, to_plain
from workbench.strategies import DDP, LocalSGD


@dataclass(frozen=True, kw_only=True)
class OfTheNotebook(DDP):
    """A strategy that workbench does not ship."""


@pytest.fixture
def changes() -> Changes:
    return Changes(Experiment(ranks=2).checked(), [])


def ask(changes: Changes, path: str, value: Any) -> PendingChange:
    return changes.request_change(path, value, lambda asked, new: None)


def applied(changes: Changes, asked: PendingChange, step: int) -> None:
    changes.note_applied(step, {"id": asked.id, "path": asked.path, "value": asked.value})


def test_a_change_is_in_force_once_it_was_applied(changes: Changes) -> None:
    asked = ask(changes, "bucket_mb", 4)
    assert changes.experiment.bucket_mb == 1.0 and asked.applied_at is None
    applied(changes, asked, 12)
    assert changes.experiment.bucket_mb == 4.0 and asked.wait(0).applied_at == 12


def test_a_short_path_is_completed_and_the_value_is_plain(changes: Changes) -> None:
    asked = ask(changes, "strategy", "LocalSGD")
    assert asked.value == to_plain(LocalSGD())
    assert ask(changes, "every", 4).path == "strategy.every"


def test_a_refusal_is_an_error_when_waited_for(changes: Changes) -> None:
    asked = ask(changes, "lr", 0.5)
    changes.note_refused({"id": asked.id, "reason": "lr=0.5: not now"})
    with pytest.raises(KnobError, match="not now"):
        asked.wait(0)
    assert changes.experiment.lr != 0.5 and "refused: lr=0.5" in repr(asked)


def test_a_change_of_another_kernel_is_listed_too(changes: Changes) -> None:
    changes.note_applied(3, {"id": "somebody's", "path": "batch", "value": 4})
    assert [(t.path, t.applied_at) for t in changes.history] == [("batch", 3)] and changes.experiment.batch == 4


def test_unapplied_changes_are_refused_at_the_end(changes: Changes) -> None:
    asked = ask(changes, "batch", 4)
    changes.refuse_unanswered("the run ended")
    assert asked.refused == "batch=4: the run ended"
    with pytest.raises(TimeoutError):
        PendingChange(Change(NEXT, "batch", 4, "1")).wait(0)


def test_an_invalid_change_is_not_sent(changes: Changes) -> None:
    sent: list[PendingChange] = []
    for path, value, text in [("ranks", 3, "cannot change"), ("lr", "fast", "lr='fast'"), ("lrr", 1, "did you mean")]:
        with pytest.raises(KnobError, match=text):
            changes.request_change(path, value, lambda asked, new: sent.append(asked))
    assert sent == [] == changes.history


def test_classes_of_the_notebook_are_sent_with_a_change(changes: Changes) -> None:
    sent: list[type] = []
    changes.request_change("strategy", OfTheNotebook(), lambda asked, new: sent.extend(new))
    assert sent == [OfTheNotebook] == list(list_foreign_classes(OfTheNotebook())) and not list(
        list_foreign_classes(DDP())
    )


def test_planned_changes_see_each_other() -> None:
    found = user_input.planned(Experiment(), [Change(9, "every", 2), Change(3, "strategy", "LocalSGD")])
    assert found == (Change(3, "strategy", to_plain(LocalSGD())), Change(9, "strategy.every", 2))
    for bad in (Change(-1, "lr", 1), Change(3, "every", 2), Change(3, "seed", 2)):
        with pytest.raises(KnobError):
            user_input.planned(Experiment(), [bad])


def test_the_old_name_turn_works_without_a_warning() -> None:
    assert Experiment().turn("lr", 0.5) == Experiment().set("lr", 0.5) != Experiment()
    lab = object.__new__(Lab)
    lab.changes = [PendingChange(Change(0, "lr", 0.5, BEFORE_RUN), 0)]
    assert lab.turns is lab.changes and Lab.turn is Lab.set
    assert repr(lab.turns[0]) == "Change lr = 0.5: kept for the next run"
