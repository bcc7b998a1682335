"""A controller may lose a port to another process at any moment of its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cluster.processes.lab_place import ClusterError, LabPlace
from workbench.cluster.processes.lab_processes import LabProcesses
from workbench.cluster.processes.process_logs import make_log_path

LOST = "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:36619')"


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LabProcesses:
    """Processes with a controller that lives at the first look only."""
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path))
    owned = LabProcesses(LabPlace.make_place("lost"))
    looks: Iterator[int | None] = iter([None])
    owned.started["controller"] = SimpleNamespace(pid=2**22 + 1, poll=lambda: next(looks, 1))  # type: ignore[assignment]
    return owned


def test_a_controller_that_loses_a_port_between_two_looks_is_replaced(
    starting: LabProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_log_path(starting.place, "controller").write_text(LOST)
    started: list[str] = []
    monkeypatch.setattr(starting, "_start_controller", lambda: started.append("controller"))
    assert not starting.introduce_controller()  # it still lives
    starting.check_children()
    assert not starting.introduce_controller() and started == ["controller"]


def test_a_controller_that_ends_for_another_reason_ends_the_start(starting: LabProcesses) -> None:
    make_log_path(starting.place, "controller").write_text("MemoryError")
    assert not starting.introduce_controller()
    with pytest.raises(ClusterError, match=r"(?s)controller ended with exit code 1 before it was up.*MemoryError"):
        starting.check_children()


def test_a_controller_that_ends_after_engines_know_it_ends_the_start(starting: LabProcesses) -> None:
    make_log_path(starting.place, "controller").write_text(LOST)
    starting.introduction_file.write_text("{}")
    assert starting.started["controller"].poll() is None
    with pytest.raises(ClusterError, match="controller ended with exit code 1 before it was up"):
        starting.check_children()


class FailingControllers:
    """Starts controllers that end at once. Each one appends one of `words` to the log."""

    def __init__(self, owned: LabProcesses, words: list[str]) -> None:
        self.processes, self.words, self.started = owned, iter(words), 0

    def start(self) -> None:
        with make_log_path(self.processes.place, "controller").open("a") as log:
            log.write(next(self.words) + "\n")
        self.processes._controllers = self.started = self.started + 1
        self.processes.started["controller"] = SimpleNamespace(pid=2**22 + 1, poll=lambda: 1)  # type: ignore[assignment]


def test_the_second_controllers_error_is_not_hidden_by_the_first_ones_log(
    starting: LabProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers = FailingControllers(starting, [LOST, "MemoryError", "a third one"])
    monkeypatch.setattr(starting, "_start_controller", controllers.start)
    controllers.start()
    assert not starting.introduce_controller() and not starting.introduce_controller()
    assert controllers.started == 2
    with pytest.raises(ClusterError, match="controller ended with exit code 1") as failed:
        starting.check_children()
    assert "MemoryError" in str(failed.value) and LOST not in str(failed.value)
    logs = {path.name: path.read_text() for path in (starting.place.path / "log").iterdir()}
    assert logs == {"controller-1.log": f"{LOST}\n", "controller.log": "MemoryError\n"}


def test_the_error_after_the_last_controller_quotes_its_log(
    starting: LabProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers = FailingControllers(starting, [f"{number}: {LOST}" for number in range(1, 5)])
    monkeypatch.setattr(starting, "_start_controller", controllers.start)
    controllers.start()
    for _ in range(3):
        assert not starting.introduce_controller()
    with pytest.raises(ClusterError, match="4 controllers in a row lost ports") as failed:
        starting.introduce_controller()
    assert f"4: {LOST}" in str(failed.value) and "3: " not in str(failed.value)
