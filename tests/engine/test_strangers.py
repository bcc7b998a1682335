"""Tests that another user cannot read, command, slow down or end a live lab."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.stranger import NOBODY
from tests.waiting import until
from workbench.cluster.api import launch
from workbench.cluster.processes.lab_processes import alive
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.strategies import Gossip
from workbench.tasks import Digits

pytestmark = pytest.mark.engine
ROOT = hasattr(os, "getuid") and os.getuid() == 0
SECONDS = 15.0  # duration of the stranger's attempts
PRINTED = "what-a-cell-prints-{}"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A lab whose folders every user may list, as in many home directories."""
    with tempfile.TemporaryDirectory(prefix="workbench-open-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", f"{folder}/runtime")
        monkeypatch.setenv("XDG_DATA_HOME", f"{folder}/data")
        with Lab(ranks=2, name="attacked") as made:
            yield made.wait(90)


def listeners(lab: Lab) -> list[int]:
    """Returns the ports on which the lab's processes listen; checks that all are on the loopback."""
    processes = [psutil.Process(int(p[0])) for p in lab.cluster.place.read_state()["processes"] if alive(p[:2])]
    found = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {a.ip for a in found} == {"127.0.0.1"}
    return sorted({a.port for a in found})


def endings(lab: Lab) -> list[psutil.Process]:
    """Returns the processes of the lab, its guard and this kernel."""
    assert lab.cluster.guard
    noted = [int(p[0]) for p in lab.cluster.place.read_state()["processes"] if alive(p[:2])]
    return [psutil.Process(pid) for pid in (*noted, lab.cluster.guard.pid, os.getpid())]


def held_open(process: psutil.Process) -> set[str]:
    """Returns the names of files that a process has open or mapped."""
    found = {m.path for m in process.memory_maps()}
    for one in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread closed it
            found.add(os.readlink(one))
    return found


def listening_locally(process: psutil.Process) -> set[str]:
    """Returns the names of unix sockets on which a process listens."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listens = {row[6]: row[7] if len(row) > 7 else "without a name" for row in rows if int(row[3], 16) & 0x10000}
    own = {name[8:-1] for name in held_open(process) if name.startswith("socket:[")}
    return {name for number, name in listens.items() if number in own}


def test_every_way_into_a_lab_is_known(lab: Lab) -> None:
    """The only ways in are sockets on the loopback, and files in folders of this user alone."""
    before = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", tempfile.gettempdir())}
    folder = Path(os.environ["WORKBENCH_RUNTIME_DIR"]).parent
    lab.run(Experiment(task=Digits(), strategy=Gossip()), out=folder / "out")
    assert until(lambda: lab.state == "running" and stepped(lab) > 3)
    kinds = {0: "this kernel", 1: "the guard"}
    for number, process in enumerate(reversed(endings(lab))):
        mine = kinds.get(number, "the lab's")
        for c in process.net_connections("inet"):
            if mine == "the lab's" and c.status == psutil.CONN_LISTEN:
                assert c.laddr.ip == "127.0.0.1", c
            assert mine == "this kernel" or c.type == socket.SOCK_STREAM, f"{mine} has {c}"
        if mine != "this kernel":
            assert not listening_locally(process), mine
            assert not [f for f in held_open(process) if f.startswith(("/dev/shm", "/dev/mqueue", "/memfd"))], mine
        assert mine != "the guard" or not process.net_connections("inet")
    for place, names in before.items():
        for path in (Path(place) / name for name in set(os.listdir(place)) - names):
            with contextlib.suppress(FileNotFoundError):
                assert path.lstat().st_mode & 0o077 == 0 or path.lstat().st_uid != os.getuid(), path
    for path in (folder / "runtime", folder / "out", *(folder / "out").iterdir(), *(folder / "runtime").iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


def stepped(lab: Lab) -> int:
    return lab.status[0]["step"] or 0


@pytest.mark.skipif(not ROOT, reason="plays another user of the machine, which takes root")
def test_another_user_reads_nothing_and_the_run_trains_on(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    hidden = secrets.token_hex
    monkeypatch.setattr(launch.secrets, "token_hex", lambda n: made.append(hidden(n)) or made[-1])
    folder = Path(os.environ["WORKBENCH_RUNTIME_DIR"]).parent
    run = lab.run(Experiment(task=Digits(), strategy=Gossip()), out=folder / "out")
    assert until(lambda: lab.state == "running" and stepped(lab) > 3)
    canary = folder / "unpickled"
    printed = [PRINTED.format(n) for n in range(30)]
    client = json.loads((lab.cluster.place.path / "security" / "ipcontroller-client.json").read_text())
    signed, keys = client["key"], json.loads(lab.cluster.place.file.read_text())["keys"]
    asked = {"ports": listeners(lab), "folders": [str(folder), tempfile.gettempdir()], "seconds": SECONDS,
             "secrets": ["what-a-cell-prints", *keys, signed, *made, lab._live.run_id],
             "canary": str(canary)}  # fmt: skip
    script = Path(__file__).with_name("stranger.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], **pipes) as it:
        assert it.stdin and it.stdout
        print(json.dumps(asked), file=it.stdin, flush=True)
        assert it.stdout.readline() == "ready\n"
        for text in printed:
            assert lab.view.execute(f"print({text!r})").stdout == [f"{text}\n"] * 2
        assert it.stdout.readline() == "tried\n"
        before = stepped(lab)
        assert lab.set("strategy", "DDP").wait(60).applied_at is not None, "it is steered as ever"
        assert lab.set("strategy", "Gossip").wait(60).applied_at is not None
        assert until(lambda: stepped(lab) > before + 20), "and trains on"
        print("", file=it.stdin, flush=True)
        got = json.loads(it.stdout.readline())
    assert (got["uid"], got["heard"], got["told"]) == (NOBODY, [], []) and got["tries"] > 100 and got["sent"] > 100
    assert len(made) == 1 and len(signed) == 64 and not canary.exists(), "nothing that it sent was unpickled"
    assert [f for f in got["opened"] if Path(f).is_relative_to(folder)] == []
    assert lab._live.run_id not in got["names"], "the run's name is in no name that others can list"
    assert lab.notes == [] and lab.state == "running"
    lab.stop()
    run.wait(60)
    every_step_counts(run)


def every_step_counts(run: Run) -> None:
    """Checks that no row is missing, no rank skipped a step, and the record mentions the strangers."""
    assert (run.state, run.missing, run.warnings) == ("stopped", 0, ())
    steps = run.spans[run.spans["lane"] == "step"]
    for rank in (0, 1):
        mine = sorted(steps[steps["rank"] == rank]["step"])
        assert mine == list(range(len(mine))) and len(mine) > 20
    counted = run.samples[run.samples["name"] == "strangers"]
    assert counted["value"].sum() > 10
