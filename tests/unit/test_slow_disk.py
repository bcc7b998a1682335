"""A run directory lies on a disk that hangs. No kernel waits for the disk, and a late answer still counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from workbench.cluster.observe import run_folder
from workbench.cluster.observe.record_monitor import RecordMonitor
from workbench.cluster.observe.run_folder import RunFolder


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk hangs until this event is set."""
    event, there = threading.Event(), run_folder._has_run

    def slow(path: Path) -> bool:
        assert event.wait(30)
        return there(path)

    monkeypatch.setattr(run_folder, "_has_run", slow)
    yield event
    event.set()


def test_a_disk_that_hangs_does_not_hold_up_who_asks_first(answers: threading.Event, tmp_path: Path) -> None:
    threading.Timer(10.0, answers.set).start()
    RunFolder(tmp_path)
    assert not answers.is_set()


def test_a_run_whose_disk_answers_late_is_still_missed_when_it_goes(answers: threading.Event, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    said: list[Any] = []
    run = SimpleNamespace(path=tmp_path, _following=False, unwritten=0)
    recording = RecordMonitor(run, lambda *it, **_: said.append(it))  # type: ignore[arg-type]
    answers.set()

    def looked() -> bool:
        recording.check_folder()
        return recording._expected

    assert until(looked) and not said
    (tmp_path / "run.json").unlink()

    def told() -> bool:
        recording.check_folder()
        return bool(said)

    assert until(told)
