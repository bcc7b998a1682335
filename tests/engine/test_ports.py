"""Checks that a lab survives when other programs take ports that its controller chose but has not yet bound."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from workbench.cluster.processes.lab_place import ClusterError, LabPlace
from workbench.cluster.processes.lab_processes import MAX_CONTROLLERS, LabProcesses, end_processes, wait_for
from workbench.cluster.processes.ports import list_listened, list_ports

pytestmark = pytest.mark.engine
REGISTRATION, HEARTBEAT, SCHEDULER = 0, 6, 8  # index of the taken port in a controller's choice

made_here: list[LabProcesses] = []


@pytest.fixture
def free() -> list[int]:
    """Returns ports that no process uses."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(20)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Robbed(LabProcesses):
    """Processes whose first `times` controllers choose a set of ports with one that is taken."""

    def __init__(self, place: LabPlace, choice: list[int], times: int) -> None:
        super().__init__(place)
        self.choice, self.times = choice, times
        made_here.append(self)

    def _start_controller(self) -> None:
        config = self.place.path / "ipcontroller_config.py"
        lines = [line for line in config.read_text().splitlines() if ".ports" not in line]
        lines += [f"c.IPController.ports = {self.choice}"] if self._controllers < self.times else []
        config.write_text("\n".join(lines))
        super()._start_controller()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LabPlace]:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path))
    made = LabPlace.make_place("robbed")
    yield made
    end_processes(made)
    for each in made_here:
        each.reap_children()
    made_here.clear()


@pytest.mark.parametrize("which", [REGISTRATION, HEARTBEAT, SCHEDULER])
def test_a_controller_that_lost_a_port_is_replaced(place: LabPlace, free: list[int], which: int) -> None:
    with socket.create_server(("127.0.0.1", free[which])):
        owned = Robbed(place, free, times=1)
        owned.start_lab(0)
        assert wait_for(owned.introduce_controller, 60)
        shown = list_ports(json.loads(owned.introduction_file.read_text()))
        assert len(shown) > 6 and shown <= list_listened(owned.started["controller"].pid)
        assert os.stat(owned.introduction_file).st_mode & 0o77 == 0


def test_forks_of_a_controller_end_with_it(place: LabPlace) -> None:
    """A controller that ends because it lost a port leaves this fork behind, and no file lists it."""
    owned = LabProcesses(place)
    made_here.append(owned)
    owned.start_lab(0)
    assert wait_for(owned.introduce_controller, 60)
    controller = psutil.Process(owned.started["controller"].pid)
    children = controller.children(recursive=True)
    assert children
    controller.kill()
    try:
        assert not psutil.wait_procs(children, timeout=30)[1]
    finally:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def test_repeatedly_lost_ports_raise_cluster_error(place: LabPlace, free: list[int]) -> None:
    with socket.create_server(("127.0.0.1", free[SCHEDULER])):
        owned = Robbed(place, free, times=MAX_CONTROLLERS)
        owned.start_lab(0)
        with pytest.raises(ClusterError, match="4 controllers in a row lost ports that they had chosen"):
            wait_for(owned.introduce_controller, 60)
