"""A checkpoint that a person asked for, waited for: which of those that a run tells of it is, and when it is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.cluster.run.changes import Changes
from workbench.cluster.run.live import Live
from workbench.experiment import Experiment
from workbench.record import kept
from workbench.record.kept import PendingCheckpoint
from workbench.run import Run, RunError


class Telling:
    """A run that has told so much; `then` is told at the look after next."""

    def __init__(self, *saved: dict[str, Any], then: tuple[str, dict[str, Any]] | None = None) -> None:
        self.name, self.made, self.state, self.live = "told", 40, "stopped", True
        self._told: dict[str, list[dict[str, Any]]] = {"saved": list(saved), "not saved": []}
        self._then, self._looks, self.asked = then, 0, 0

    def keep(self) -> None:
        self.asked += 1

    def details(self, name: str) -> list[tuple[int, float, dict[str, Any]]]:
        self._looks += name == "saved"
        if self._then and self._looks == 3:
            kind, about = self._then
            self._told[kind].append(about)
        return [(0, 0.0, one) for one in self._told[name]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LOOK", 0.0)


def one(step: int, asked: bool) -> dict[str, Any]:
    return {"step": step, "path": f"checkpoints/step-{step}", "asked": asked}


def test_one_that_may_be_removed_again_is_not_it() -> None:
    """The run makes some of its own meanwhile, and the view of the record is late: it may be of an earlier step."""
    run: Any = Telling(one(20, True), one(40, False), then=("saved", one(39, True)))
    assert PendingCheckpoint(run).wait(60) == Path("checkpoints/step-39") and run.asked == 1


def test_where_the_run_stands_at_one_that_was_asked_for_it_is_that() -> None:
    run: Any = Telling(one(40, True))
    assert PendingCheckpoint(run).wait(60) == Path("checkpoints/step-40")


def test_that_none_could_be_made_is_an_error_with_its_reason() -> None:
    run: Any = Telling(then=("not saved", {"text": "no checkpoint was made before step 41: the disk is full"}))
    with pytest.raises(RunError, match="step 41: the disk is full"):
        PendingCheckpoint(run).wait(60)


def test_a_run_that_ends_before_and_one_that_takes_too_long_are_told_apart() -> None:
    run: Any = Telling()
    with pytest.raises(TimeoutError, match="no checkpoint of told was whole within 0 s; the run goes on"):
        PendingCheckpoint(run).wait(0)
    run.live = False
    with pytest.raises(RunError, match="told is stopped: it ended before a checkpoint was made"):
        PendingCheckpoint(run).wait(60)


def test_each_is_asked_for_by_a_name_of_its_own() -> None:
    """What those who are left of a run have done already, by its name, is not asked of them again."""
    live = Live(Run({}, live=True), Any, Changes(Experiment(ranks=2), []), "g")  # type: ignore[arg-type]
    live.keep()
    live.keep()
    names = [live.orders._queue.get()[3]["request"]["id"] for _ in range(2)]
    assert len(set(names)) == 2
