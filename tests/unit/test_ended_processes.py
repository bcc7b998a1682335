"""Tests that a lab goes on without a process that ends between two looks at it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from workbench.cluster.engines import process_restart
from workbench.cluster.processes import lab_processes as module
from workbench.cluster.processes.lab_place import LabPlace, this_process
from workbench.cluster.processes.lab_processes import LabProcesses, measure_memory

GONE = 2**22 + 1  # more than the largest pid


class Ended:
    """A child that has ended since it was found."""

    pid = GONE

    def kill(self) -> None:
        raise psutil.NoSuchProcess(GONE)

    def create_time(self) -> float:
        raise psutil.NoSuchProcess(GONE)

    def children(self, recursive: bool) -> list[Ended]:
        return [Ended()]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LabPlace:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path))
    return LabPlace.make_place("ended")


def test_memory_leaves_out_a_process_that_ends_during_the_look(
    place: LabPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "alive", lambda process: True)
    place.add_process([GONE, 1.0], "engine 0")
    place.add_process(this_process(), "engine 1")
    mine = int(this_process()[0])
    assert list(found := measure_memory(place)) == [f"engine 1 ({mine})"] and found[f"engine 1 ({mine})"] > 1


@pytest.mark.parametrize("who", ["the controller", "its child"])
def test_a_controller_or_its_child_that_has_ended_is_not_noted(
    who: str, place: LabPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = LabProcesses(place)
    made.started["controller"] = SimpleNamespace(pid=GONE)
    if who == "its child":
        monkeypatch.setattr(psutil, "Process", lambda pid=None: Ended())
    made.note_children()
    assert place.state["processes"] == []


def test_another_controller_starts_although_a_child_of_the_last_one_has_ended(
    place: LabPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, did = LabProcesses(place), list[str]()
    made.started["controller"] = SimpleNamespace(
        pid=GONE, poll=lambda: None, kill=lambda: did.append("kill"), wait=lambda timeout: None
    )
    monkeypatch.setattr(psutil, "Process", lambda pid=None: Ended())
    monkeypatch.setattr(made, "_start_controller", lambda: did.append("start"))
    made._another_controller([])
    assert did == ["kill", "start"]


def test_an_engine_restarts_although_a_child_of_its_own_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[Any] = []
    monkeypatch.setattr(psutil, "Process", lambda pid=None: Ended())
    monkeypatch.setattr(psutil, "wait_procs", lambda children, timeout: came.append(len(children)))
    for name in ("set_inheritable", "chdir"):
        monkeypatch.setattr(process_restart.os, name, lambda *_: None)
    monkeypatch.setattr(process_restart, "_restore_stream", lambda *_: None)
    monkeypatch.setattr(process_restart.os, "execve", lambda program, *_: came.append(program))
    process_restart._execute_again()
    assert came == [1, process_restart.sys.executable]
