"""Tests lifetimes: kernels that die, labs detached and found again, clusters started by other programs.

Each test plays the kernel with its own process, so that the test can kill it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from workbench.cluster.api import launch
from workbench.cluster.engines import cluster as cluster_module
from workbench.cluster.processes.fork_server import can_fork
from workbench.cluster.processes.lab_place import ClusterError, alive, list_places
from workbench.cluster.processes.lab_processes import end_processes
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.settings import KnobError
from workbench.strategies import DDP
from workbench.tasks import Loop

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BEGIN = f"""
import json, os, psutil, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
from workbench.cluster.api import launch
launch.SESSION_CLASS = "test_cluster_fake:FakeSession"
from workbench.lab import Lab
from workbench.experiment import Experiment
from workbench.run import Run
def say(**what):
    print(json.dumps(what), flush=True)
def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (lab.state, lab.progress, lab.notes, lab.status)
        time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(launch, "SESSION_CLASS", "test_cluster_fake:FakeSession")
    monkeypatch.syspath_prepend(str(HERE))
    yield
    left = [(p, p.read_state()) for p in list_places()]
    for place, state in left:
        end_processes(place)
        if state["owner"] and alive(state["owner"]) and state["owner"][0] != os.getpid():
            psutil.Process(int(state["owner"][0])).kill()


class Kernel:
    """A process that runs `code` like a notebook kernel and answers in lines of JSON."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )

    def hears(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the kernel ended without a word"
        return json.loads(line)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *rest: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stdin):
            assert pipe
            pipe.close()


RUNNING = """
lab = Lab(ranks=2, name="{name}")
run = lab.run(Experiment())
until(lambda: lab.state == "running", 90)
until(lambda: len(Run.open(run.path).spans) > 0)
say(processes=lab.cluster.place.read_state()["processes"], path=str(run.path), guard=lab.cluster.guard.pid,
    guarded=psutil.Process(lab.cluster.guard.pid).create_time())
"""

AGAIN = """
until(lambda: not run.live)  # a guest that closes stops the run that it sees
run = lab.run(Experiment())
until(lambda: lab.state == "running")
say(live=run.live)
time.sleep(100)
"""


def gone(processes: list[Any], seconds: float = 60.0) -> None:
    """Waits until the processes have ended; fails if they take more than `seconds`."""
    end = time.monotonic() + seconds
    while living := [p for p in processes if alive(p[:2])]:
        assert time.monotonic() < end, f"still there: {living}"
        time.sleep(0.05)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "with a frozen engine"])
def test_nothing_survives_a_killed_kernel(frozen: bool) -> None:
    with Kernel(RUNNING.format(name="doomed") + "time.sleep(100)") as kernel:
        said = kernel.hears()
        assert len(said["processes"]) >= 4 and all(alive(p[:2]) for p in said["processes"])
        if frozen:
            os.kill(said["processes"][1][0], signal.SIGSTOP)
        kernel.process.kill()
        gone(said["processes"])
    assert len(Run.open(said["path"]).spans) > 0
    gone([[said["guard"], said["guarded"]]])
    assert list_places() == []


def test_nothing_survives_when_the_guard_was_killed_first() -> None:
    with Kernel(RUNNING.format(name="unguarded") + "time.sleep(100)") as kernel:
        said = kernel.hears()
        assert len(said["processes"]) >= 4 and all(alive(p[:2]) for p in said["processes"])
        os.kill(said["guard"], signal.SIGKILL)
        kernel.process.kill()
        gone(said["processes"])
    assert not any(alive(p[:2]) for p in said["processes"])


def test_a_kernel_that_ends_in_order_leaves_nothing() -> None:
    with Kernel(RUNNING.format(name="orderly")) as kernel:
        said = kernel.hears()
        assert kernel.process.wait(60) == 0
        gone(said["processes"], 0.5)
    assert list_places() == []


def test_a_detached_run_goes_on_and_is_found_from_its_first_row_on() -> None:
    with Kernel(RUNNING.format(name="left") + "lab.detach(); say(state=lab.state)") as kernel:
        said = kernel.hears()
        assert kernel.hears()["state"] == "closed"
        kernel.process.wait(60)
    assert until(lambda: Run.open(said["path"]).spans.groupby("rank").step.max().min() > 150), "it goes on"
    assert all(alive(p[:2]) for p in said["processes"])
    lab = Lab.attach()
    try:
        assert (lab.name, lab.ranks, lab.state) == ("left", 2, "running")
        run = lab.run_now
        assert run and run.live and str(run.path) == said["path"] and Lab.attach("left") is lab
        assert lab.set("bucket_mb", 2.0).wait(60).applied_at > 100
        lab.stop()
        assert run.wait(60).state == "stopped"
        for rank in (0, 1):
            mine = run.spans[run.spans["rank"] == rank]
            assert list(mine["step"]) == list(range(len(mine))) and len(mine) > 100
        assert run.missing == 0
        assert lab.run(Experiment(steps=3)).wait(60).state == "done"
    finally:
        lab.close()
    gone(said["processes"], 1)


def test_a_detached_run_is_found_even_if_its_directory_was_removed() -> None:
    with Kernel(RUNNING.format(name="bare") + "lab.detach()") as kernel:
        path = Path(kernel.hears()["path"])
        kernel.process.wait(60)
    while path.exists():  # a rank may create another file at the same time
        shutil.rmtree(path, ignore_errors=True)
    lab = Lab.attach("bare")
    try:
        run = lab.run_now
        assert run and run.live and "could not be read from disk" in run.warnings[0]
        lab.stop()
        assert run.wait(60).state == "stopped" and len(run.timeline.spans) > 0
        assert 0 < run.unwritten == sum(len(run.timeline.table(kind)) for kind in ("spans", "samples", "marks"))
        assert "run.save('elsewhere') writes all rows that are shown here" in lab.notes[-1]
        rest = Run.open(run.save(path.with_name("rest")))
        assert len(rest.timeline.spans) == len(run.timeline.spans) and rest.missing == run.missing > 0
    finally:
        lab.close()


def test_a_lab_that_was_attached_dies_with_its_new_kernel() -> None:
    with Kernel(RUNNING.format(name="handed") + "lab.detach()") as kernel:
        said = kernel.hears()
        kernel.process.wait(60)
    with Kernel("lab = Lab.attach('handed'); say(state=lab.state); time.sleep(100)") as second:
        assert second.hears()["state"] == "running"
        second.process.kill()
        gone(said["processes"])


def test_a_guest_sees_a_run_that_another_kernel_owns_and_takes_nothing_with_it() -> None:
    with Kernel(RUNNING.format(name="hosted") + AGAIN) as host:
        said = host.hears()
        lab = Lab.attach("hosted")
        assert lab.state == "running" and len(lab.run_now.spans) > 0
        assert lab.set("bucket_mb", 2.0).wait(60).applied_at > 0
        lab.close()
        assert all(alive(p[:2]) for p in said["processes"])
        assert host.hears()["live"]
        again = Lab.attach("hosted")
        host.process.kill()
        gone(said["processes"])
        with pytest.raises(ClusterError, match="the kernel that owned lab 'hosted' ended, and its ranks with it"):
            again.run_now.wait(60)
        assert again.state == "failed" and any(n.endswith("and its ranks with it") for n in again.notes)
        again.close()


def test_a_lab_of_another_size_takes_the_place_of_an_idle_one_even_while_it_starts() -> None:
    one = Lab(ranks=1, name="resized")
    began = one.cluster.place.read_state()["processes"]
    with Lab(ranks=2, name="resized") as two:
        assert one.state == "closed" and two.ranks == 2
        gone(began)
        assert len(two.wait(60).status) == 2


def test_attaching_without_a_live_lab_raises_cluster_error() -> None:
    with pytest.raises(ClusterError, match="there is no live lab called 'nobody'"):
        Lab.attach("nobody")


def test_two_kernels_with_labs_of_one_name_do_not_meet() -> None:
    with Kernel(RUNNING.format(name="lab") + "time.sleep(100)") as one, Kernel(RUNNING.format(name="lab")) as two:
        first, second = one.hears(), two.hears()
        assert not {p[0] for p in first["processes"]} & {p[0] for p in second["processes"]}
        two.process.wait(60)
        gone(second["processes"], 1)
        assert all(alive(p[:2]) for p in first["processes"])
        one.process.kill()
        gone(first["processes"])


# -- clusters that another program started


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Any]:
    """Starts ipcontroller and ipengine by hand; yields (client file, function that starts an engine, processes)."""
    started: list[subprocess.Popen[bytes]] = []

    def start(what: str, env: dict[str, str], *arguments: str) -> None:
        profile = f"--profile-dir={tmp_path / 'profile_hand'}"
        command = [sys.executable, "-m", f"ipyparallel.{what}", profile, *arguments]
        own = {"IPYTHONDIR": str(tmp_path), "PYTHONPATH": f"{env.pop('PYTHONPATH', '')}{os.pathsep}{ROOT}", **env}
        with open(tmp_path / f"{what}.log", "ab") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}))

    def engine(**env: str) -> None:
        start("engine", dict(env), "--IPEngine.wait_for_url_file=30")

    (tmp_path / "profile_hand").mkdir()  # two processes that both create it would conflict
    start("controller", {}, "--HeartMonitor.period=500", "--IPController.use_threads=True")
    yield tmp_path / "profile_hand" / "security" / "ipcontroller-client.json", engine, started
    for process in reversed(started):
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def ready(file: Path, engines: int) -> None:
    import ipyparallel

    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with ipyparallel.Client(str(file), timeout=30) as client:
        client.wait_for_engines(engines, timeout=60)


def test_a_cluster_started_by_hand_is_used_and_left(
    by_hand: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, engine, started = by_hand
    engine()
    engine()
    ready(file, 2)
    monkeypatch.setattr(cluster_module, "FIND_TIMEOUT", 2.0)
    with pytest.raises(ClusterError, match=r"ranks=3: the cluster has 2 engines; start 1 more \(ipengine\)"):
        Lab(ranks=3, name="three", cluster=file).wait(60)
    with Lab(ranks=2, name="two", cluster=file) as lab:
        assert lab.run(Experiment(steps=10)).wait(60).state == "done"
        assert lab.cluster.place.read_state()["processes"] == []
    assert all(process.poll() is None for process in started)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with Lab(ranks=1, name="again", profile="hand") as lab:
        run = lab.run(Experiment())
        psutil.Process(lab.wait(60).status[0]["pid"]).kill()
        with pytest.raises(Exception, match="is gone"):
            run.wait(60)


def test_engines_started_by_hand_restart_their_process_after_a_users_loop(by_hand: Any) -> None:
    def mark() -> int:
        import os
        import sys

        sys.left_behind = True  # type: ignore[attr-defined]
        os.environ["LEFT_BEHIND"] = "yes"
        return os.getpid()

    def left() -> tuple[int, bool, bool]:
        import os
        import sys

        return os.getpid(), hasattr(sys, "left_behind"), "LEFT_BEHIND" in os.environ

    file, engine, started = by_hand
    engine()
    engine()
    ready(file, 2)
    loop = Experiment(task=Loop(run=print), ranks=2, strategy=DDP(), eval_every=0, steps=10)
    with Lab(ranks=2, name="loops", cluster=file) as lab:
        pids = lab.view.apply_sync(mark)
        assert lab.run(loop).wait(90).state == "done"
        assert lab.run(loop).wait(90).state == "done"
        assert until(lambda: lab.view.apply_sync(left) == [(pid, False, False) for pid in pids], 90)
        assert lab.run(Experiment(steps=10)).wait(90).state == "done"
    assert all(process.poll() is None for process in started)


def test_an_engine_with_other_versions_is_named_before_anything_runs(by_hand: Any, tmp_path: Path) -> None:
    file, engine, _ = by_hand
    other = tmp_path / "other" / "torch-1.2.3.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    engine(PYTHONPATH=str(other.parent))
    ready(file, 1)
    with Lab(ranks=1, name="differs", cluster=file) as lab:
        with pytest.raises(ClusterError, match=r"versions differ.*engine 0 on .* has torch 1.2.3, this kernel has"):
            lab.run().wait(60)
        assert lab.state == "failed"


# -- invalid input, and engines that do not start


def test_an_engine_that_fails_to_start_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Lab(ranks=1, name="broken") as lab:
        who = "engines" if can_fork() else "engine 0"
        with pytest.raises(ClusterError, match=rf"(?s){who} ended with exit code 1 .*this torch is broken"):
            lab.wait(60)
        assert lab.state == "failed" and "this torch is broken" in lab.notes[0]


def test_an_engine_that_is_late_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; print('still loading', flush=True); time.sleep(100)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(cluster_module, "START_TIMEOUT", 5.0)
    text = r"(?s)within 5 s: engine 0\..*still loading"
    with Lab(ranks=1, name="late") as lab, pytest.raises(ClusterError, match=text):
        lab.wait(60)


def test_a_missing_connection_file_raises_cluster_error() -> None:
    with Lab(ranks=1, name="nowhere", cluster="nowhere.json") as lab:
        with pytest.raises(ClusterError, match="no such connection"):
            lab.wait(60)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, 65])
def test_an_impossible_number_of_ranks_raises_knob_error(ranks: Any) -> None:
    with pytest.raises(KnobError, match=rf"ranks={ranks}: must be an integer in \[1, 64\]"):
        Lab(ranks=ranks, name="never")
    assert list_places() == []


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_a_missing_gpu_raises_knob_error() -> None:
    with Lab(ranks=1, name="gpus", device=3) as lab, pytest.raises(KnobError, match="device=3: there is no GPU"):
        lab.wait(60)
