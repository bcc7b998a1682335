"""Tests waiting for a requested checkpoint: how it is recognized among other checkpoints, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.experiment import Experiment
from workbench.record import checkpoint_request as kept
from workbench.record.checkpoint_request import PendingCheckpoint
from workbench.run import Run, RunError


class Telling:
    """A run that reports these checkpoints. It reports `then` at the third look for saved ones."""

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
    monkeypatch.setattr(kept, "POLL_INTERVAL", 0.0)


def one(step: int, asked: bool) -> dict[str, Any]:
    return {"step": step, "path": f"checkpoints/step-{step}", "asked": asked}


def test_a_regular_checkpoint_does_not_answer_a_request() -> None:
    """The run also makes regular checkpoints, and the view of the record is late: it may report an earlier step."""
    run: Any = Telling(one(20, True), one(40, False), then=("saved", one(39, True)))
    assert PendingCheckpoint(run).wait(60) == Path("checkpoints/step-39") and run.asked == 1


def test_a_requested_checkpoint_of_the_current_step_answers_the_request() -> None:
    run: Any = Telling(one(40, True))
    assert PendingCheckpoint(run).wait(60) == Path("checkpoints/step-40")


def test_a_failed_checkpoint_is_an_error_with_its_reason() -> None:
    run: Any = Telling(then=("not saved", {"text": "no checkpoint was made before step 41: the disk is full"}))
    with pytest.raises(RunError, match="step 41: the disk is full"):
        PendingCheckpoint(run).wait(60)


def test_an_ended_run_and_a_timeout_give_different_errors() -> None:
    run: Any = Telling()
    with pytest.raises(TimeoutError, match="no checkpoint of told was complete within 0 s; the run goes on"):
        PendingCheckpoint(run).wait(0)
    run.live = False
    with pytest.raises(RunError, match="told is stopped: it ended before a checkpoint was made"):
        PendingCheckpoint(run).wait(60)


def test_each_request_has_a_unique_name() -> None:
    """The ranks left after a loss ignore requests whose name they know."""
    live = RunController(Run({}, live=True), Any, Changes(Experiment(ranks=2), []), "g")  # type: ignore[arg-type]
    live.request_checkpoint()
    live.request_checkpoint()
    names = [live.commands._queue.get()[3]["request"]["id"] for _ in range(2)]
    assert len(set(names)) == 2
