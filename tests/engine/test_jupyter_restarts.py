"""Restarts JupyterLab: no process of a lab remains, or a detached lab is found with its run.

Kernels are children of JupyterLab's server and end with it, even if the server is killed. The ranks are light
stand-ins.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from workbench.cluster.processes.lab_place import alive, list_places
from workbench.cluster.processes.lab_processes import end_processes
from workbench.record.run import Run

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BEGIN = f"""
import json, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
from workbench.cluster.api import launch
launch.SESSION_CLASS = "test_cluster_fake:FakeSession"
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.record.run import Run
from tests.waiting import until
"""
RUNS = """
lab = Lab(ranks=2, name="served")
run = lab.run(Experiment(steps=0))
assert until(lambda: lab.state == "running", 90)
assert until(lambda: len(Run.open(run.path).spans) > 0)  # a rank writes down a few times a second
print(json.dumps({"processes": lab.cluster.place.read_state()["processes"], "path": str(run.path)}))
"""
AGAIN = """
lab = Lab.attach("served")
found = lab.run_now
lab.stop()
found.wait(60)
steps = [sorted(found.spans[found.spans["rank"] == rank].step) for rank in (0, 1)]
whole = all(mine == list(range(len(mine))) and len(mine) > 5 for mine in steps)
print(json.dumps({"whole": whole, "missing": found.missing, "path": str(found.path), "state": found.state}))
lab.close()
"""


class Server:
    """A JupyterLab server with one kernel that runs given code."""

    def __init__(self, runtime: str, folder: Path) -> None:
        token = secrets.token_hex(16)
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root",
                   f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
                   "--KernelManager.transport=ipc"]  # fmt: skip
        env = {**os.environ, "JUPYTER_RUNTIME_DIR": runtime, "JUPYTER_CONFIG_DIR": str(folder / "config"),
               "IPYTHONDIR": str(folder / "ipython")}  # fmt: skip
        self.log = (folder / f"jupyter-{token[:4]}.log").open("w")
        self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        said = Path(runtime, f"jpserver-{self.process.pid}.json")
        assert until(lambda: said.exists() and said.read_text().endswith("}"), 120), "it did not start"
        ask = f"http://127.0.0.1:{json.loads(said.read_text())['port']}/api/kernels?token={token}"

        def asked() -> bool:
            try:
                with urllib.request.urlopen(urllib.request.Request(ask, b"{}", method="POST"), timeout=60) as answer:
                    self.kernel = json.load(answer)["id"]
            except OSError:
                return False
            return True

        assert until(asked, 60), "it starts no kernel"
        self.file = Path(runtime, f"kernel-{self.kernel}.json")

    def does(self, code: str) -> dict[str, Any]:
        """Runs `code` in the kernel and returns the line of JSON that it prints."""
        from jupyter_client.blocking import BlockingKernelClient

        client, said = BlockingKernelClient(connection_file=str(self.file)), [""]
        client.load_connection_file()
        client.start_channels()

        def answers() -> bool:  # `wait_for_ready` mistakes a kernel that is still starting for a dead one
            try:
                client.kernel_info(reply=True, timeout=3)
            except (TimeoutError, queue.Empty):
                return False
            return True

        try:
            assert until(answers, 90), "its kernel does not answer"
            hook = lambda message: said.append(message["content"].get("text", ""))  # noqa: E731
            reply = client.execute_interactive(BEGIN + code, timeout=120, output_hook=hook)
        finally:
            client.stop_channels()
        assert reply["content"]["status"] == "ok", reply["content"]
        return dict(json.loads("".join(said).strip().splitlines()[-1]))

    def ends(self, how: int) -> None:
        """Ends the server and waits until its kernels have noticed."""
        family = psutil.Process(self.process.pid).children()
        self.process.send_signal(how)
        self.process.wait(60)
        self.log.close()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, "a kernel outlived JupyterLab"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    started: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="jupyter-", dir="/tmp") as runtime:  # paths of sockets must be short

        def begin() -> Server:
            started.append(Server(runtime, tmp_path))
            return started[-1]

        yield begin
        for server in started:
            if server.process.poll() is None:
                server.ends(signal.SIGKILL)
    for place in list_places():
        end_processes(place)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_nothing_is_left_of_a_lab_once_jupyterlab_is_gone(start: Any, how: int) -> None:
    server = start()
    said = server.does(RUNS)
    assert len(said["processes"]) >= 4 and all(alive(p[:2]) for p in said["processes"])
    server.ends(how)
    assert until(lambda: not any(alive(p[:2]) for p in said["processes"]) and list_places() == [])
    assert len(Run.open(said["path"]).spans) > 0


def test_a_detached_lab_is_found_in_the_jupyterlab_that_is_started_next(start: Any) -> None:
    server = start()
    said = server.does(RUNS + "lab.detach()")
    server.ends(signal.SIGKILL)
    time.sleep(2.0)  # training goes on in this time
    assert all(alive(p[:2]) for p in said["processes"])
    found = start().does(AGAIN)
    assert found == {"whole": True, "missing": 0, "path": said["path"], "state": "stopped"}
    assert until(lambda: not any(alive(p[:2]) for p in said["processes"]))
