"""Checks that a closed lab starts no more processes, and that every started process is noted."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cluster.processes import lab_processes as module
from workbench.cluster.processes.lab_place import ClusterError, LabPlace
from workbench.cluster.processes.lab_processes import LabProcesses


class Child:
    """A stub of a process that takes a while to start."""

    pid = 4_000_000
    code = 0

    def wait(self, timeout: float) -> int:
        return self.code


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LabProcesses:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path))

    def popen(*_: object) -> Child:
        time.sleep(0.05)
        return Child()

    monkeypatch.setattr(module, "_open_process", popen)
    monkeypatch.setattr(module, "can_fork", lambda: False)
    known = {"Process": lambda pid: SimpleNamespace(create_time=lambda: 1.0), "net_if_addrs": dict}
    monkeypatch.setattr(module, "psutil", SimpleNamespace(**known))
    return LabProcesses(LabPlace.make_place("slow"))


def test_closing_during_a_start_ends_every_process_and_starts_no_more(slow: LabProcesses) -> None:
    said: list[str] = []

    def start() -> None:
        try:
            slow.start_lab(20)
        except ClusterError as error:
            said.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    while len(slow.started) < 3:
        time.sleep(0.005)
    slow.close()
    there = dict(slow.started)
    slow.reap_children()
    thread.join(60)
    assert slow.started == there and 3 <= len(there) < 21
    assert [p[2] for p in slow.place.read_state()["processes"]] == list(there)
    assert said == ["the lab was closed while it came up"]
