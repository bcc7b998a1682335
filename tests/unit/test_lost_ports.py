"""A controller may lose a port to another process at any moment of its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cluster.processes.logs import log_file
from workbench.cluster.processes.place import ClusterError, LabPlace
from workbench.cluster.processes.processes import LabProcesses

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
    log_file(starting.place, "controller").write_text(LOST)
    started: list[str] = []
    monkeypatch.setattr(starting, "_start_controller", lambda: started.append("controller"))
    assert not starting.introduce_controller()  # it still lives
    starting.check_children()
    assert not starting.introduce_controller() and started == ["controller"]


def test_a_controller_that_ends_for_another_reason_ends_the_start(starting: LabProcesses) -> None:
    log_file(starting.place, "controller").write_text("MemoryError")
    assert not starting.introduce_controller()
    with pytest.raises(ClusterError, match=r"(?s)controller ended with exit code 1 before it was up.*MemoryError"):
        starting.check_children()


def test_a_controller_that_ends_after_engines_know_it_ends_the_start(starting: LabProcesses) -> None:
    log_file(starting.place, "controller").write_text(LOST)
    starting.introduction_file.write_text("{}")
    assert starting.started["controller"].poll() is None
    with pytest.raises(ClusterError, match="controller ended with exit code 1 before it was up"):
        starting.check_children()
