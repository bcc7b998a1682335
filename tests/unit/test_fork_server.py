"""Tests the server that forks engines: environment, exit reports, and lifetimes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from workbench.cluster.processes import fork_server, lab_processes
from workbench.cluster.processes.fork_server import ForkedEngine, ForkServer
from workbench.cluster.processes.lab_place import LabPlace
from workbench.cluster.processes.lab_processes import LabProcesses, end_processes

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60.0
SERVER = """
import os, sys, threading, time
from workbench.cluster.processes import fork_server

def live():
    print(sys.argv[1:], *map(os.environ.get, ("COLOUR", "GONE", "FORCED")), os.getcwd(), os.getsid(0) == os.getpid(),
          threading.active_count(), sorted(map(int, os.listdir("/proc/self/fd")))[:-1], flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if "raises" in sys.argv:
        raise ValueError("no engine")
    if "ends" in sys.argv:
        os._exit(7)
    time.sleep(600)

fork = os.fork

def forks():
    if os.path.exists("no more processes"):
        raise OSError(11, "Resource temporarily unavailable")
    return fork()

os.fork = forks
print("a site's own module says this", flush=True)
fork_server.PRELOADED_MODULES = ("numpy",)
fork_server.serve_forks(live)
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[ForkServer, Callable[..., ForkedEngine]]]:
    """Starts a server. Yields it with a function that forks an engine by name, and ends all processes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GONE", "still there")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", SERVER], cwd=tmp_path, **pipes)  # type: ignore[call-overload]
    noted: list[Any] = []
    server, forked = ForkServer(process, lambda *told: noted.append(told)), list[ForkedEngine]()

    def fork(what: str, *arguments: str) -> ForkedEngine:
        forked.append(ForkedEngine(what))
        server.fork_engine(forked[-1], list(arguments), tmp_path / f"{what}.log", {"FORCED": "lo"})
        return forked[-1]

    server.told = noted  # type: ignore[attr-defined]
    yield server, fork
    for one in forked:
        one.kill()
    process.kill()
    assert until(lambda: server.is_over, BOUND)
    process.wait(BOUND)


def there(one: ForkedEngine) -> ForkedEngine:
    assert until(lambda: one.pid > 0, BOUND)
    return one


def test_an_engine_has_the_kernels_environment_and_its_exit_is_reported(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, fork = served
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.setenv("FORCED", "eth9")
    monkeypatch.delenv("GONE")
    monkeypatch.chdir(tmp_path)
    assert fork("engine 0", "--first", "ends").wait(BOUND) == 7
    said = (tmp_path / "engine 0.log").read_text().splitlines()
    assert said == [f"['--first', 'ends'] green None lo {tmp_path} True 1 [0, 1, 2]", "to stderr"]
    assert fork("engine 1", "raises").wait(BOUND) == 1
    assert "ValueError: no engine" in (tmp_path / "engine 1.log").read_text()
    killed = there(fork("engine 2"))
    assert killed.poll() is None and not killed.is_unreported
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.05)
    killed.kill()
    assert killed.wait(BOUND) == killed.poll() == -signal.SIGKILL
    assert ["engine 2", [killed.pid, killed.created]] in [list(one) for one in server.told]


def test_an_engine_killed_before_its_fork_ends_at_once(served: Any) -> None:
    server, fork = served
    server.process.send_signal(signal.SIGSTOP)
    late = fork("engine 0")
    late.kill()
    assert not late.pid and late.poll() is None
    server.process.send_signal(signal.SIGCONT)
    assert late.wait(BOUND) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["its input ends", "it is told to end"])
def test_a_server_ends_after_its_engines_and_forks_no_more(served: Any, how: str) -> None:
    server, fork = served
    one = there(fork("engine 0"))
    if how == "its input ends":
        server.process.stdin.close()
    else:
        server.process.send_signal(signal.SIGSTOP)
        late = fork("engine 1")
        server.process.terminate()
        server.process.send_signal(signal.SIGCONT)
        assert late.wait(BOUND) == fork_server.NEVER_FORKED and not late.pid
        assert fork("engine 2").wait(BOUND) == fork_server.NEVER_FORKED, "another server has to be started"
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.3)
    assert psutil.Process(one.pid).is_running() and one.poll() is None
    one.send_signal(signal.SIGTERM)
    assert one.wait(BOUND) == -signal.SIGTERM
    assert server.process.wait(BOUND) == 0
    assert until(lambda: server.is_over, BOUND)


def test_a_failed_fork_affects_no_other_engine(served: Any, tmp_path: Path) -> None:
    _, fork = served
    one, lack = there(fork("engine 0")), tmp_path / "no more processes"
    lack.touch()
    assert fork("engine 1").wait(BOUND) == 1
    lack.unlink()
    assert there(fork("engine 2")).poll() is one.poll() is None


def test_a_dead_engine_is_noticed_while_the_server_is_stopped(served: Any) -> None:
    server, fork = served
    one = there(fork("engine 0"))
    server.process.send_signal(signal.SIGSTOP)
    one.kill()
    assert one.wait(BOUND) is None and one.is_unreported and one.is_lost
    server.process.send_signal(signal.SIGCONT)


def test_engines_outlive_a_killed_server_and_their_exit_is_unknown(served: Any) -> None:
    server, fork = served
    one = there(fork("engine 0"))
    server.process.kill()
    assert until(lambda: one.is_unreported, BOUND)
    assert one.poll() is None and psutil.Process(one.pid).is_running()
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.05)
    os.kill(one.pid, signal.SIGKILL)
    assert one.wait(BOUND) is None
    assert until(lambda: server.is_over, BOUND)
    assert fork("engine 1").wait(BOUND) == fork_server.NEVER_FORKED, "nobody forks it"


def test_reports_behind_the_closing_are_read_from_a_server_that_is_reaped_already() -> None:
    mine = os.getpid()
    reports = [f'{{"what": "engine 0", "pid": {mine}}}', '{"closing": true}', f'{{"pid": {mine}, "code": 7}}']
    script = "import sys; sys.stdin.readline(); print(*sys.argv[1:], sep='\\n', flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", script, *reports], **pipes)  # type: ignore[call-overload]
    server, engine = ForkServer(process, lambda *_: process.wait(BOUND)), ForkedEngine("engine 0")
    server.fork_engine(engine, [], Path("log"), {})
    assert engine.end_event.wait(BOUND) and engine.returncode == 7


def test_pending_engines_end_with_a_killed_server(served: Any) -> None:
    server, fork = served
    server.process.send_signal(signal.SIGSTOP)
    late = fork("engine 0")
    server.process.kill()
    assert late.wait(BOUND) == late.poll() == -signal.SIGKILL and not late.pid


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LabProcesses]:
    """Returns what starts a lab's processes, with light stand-ins for these."""
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "labs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(lab_processes, "_HERE", tmp_path)
    monkeypatch.setattr(lab_processes, "can_fork", lambda: True)
    (tmp_path / "boot.py").write_text(f"import sys, time\nif sys.argv[1] != 'engines': time.sleep(600)\n{SERVER}")
    made = LabProcesses(LabPlace.make_place("many"))
    yield made
    made.close()
    end_processes(made.place)
    made.reap_children()
    made.place.remove_folder()


def left(of: LabProcesses) -> list[psutil.Process]:
    """Returns a lab's processes by their command line, with any parent."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(of.place.file) in (p.info["cmdline"] or ())]


def test_closing_while_a_server_forks_forgets_no_engine(owned: LabProcesses) -> None:
    owned.start_lab(24)
    engines = [child for child in owned.started.values() if isinstance(child, ForkedEngine)]
    assert len(engines) == 24 and until(lambda: sum(e.pid > 0 for e in engines) >= 4, BOUND)
    owned.close()
    end_processes(owned.place)
    owned.reap_children()
    assert left(owned) == [] and all(e.end_event.is_set() for e in engines)


def test_an_engine_dismissed_before_its_fork_blocks_nothing(owned: LabProcesses) -> None:
    owned.start_lab(0)
    owned.start_engine(0)
    server = owned.started["engines"]
    server.send_signal(signal.SIGSTOP)
    owned.start_engine(1)
    late = owned.started["engine 1"]
    owned.dismiss_engine(1)
    server.send_signal(signal.SIGCONT)
    assert late.wait(BOUND) == -signal.SIGKILL and owned.next_engine == 2


def test_a_new_server_replaces_a_terminated_one(owned: LabProcesses) -> None:
    owned.start_lab(1)
    first, server = owned.started["engine 0"], owned.started["engines"]
    assert until(lambda: first.pid > 0, BOUND)
    server.send_signal(signal.SIGTERM)
    assert until(lambda: owned._server is not None and owned._server.is_over, BOUND)
    owned.start_engine(1)
    second = owned.started["engine 1"]
    assert until(lambda: second.pid > 0, BOUND) and owned.started["engines"] is not server
    assert first.poll() is second.poll() is None


def test_engines_are_not_forked_with_accelerators_or_on_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fork_server, "GPU_DEVICES", (str(tmp_path / "chip"),))
    monkeypatch.setattr(sys, "platform", "linux")
    assert fork_server.can_fork()
    (tmp_path / "chip").touch()
    assert not fork_server.can_fork()
    (tmp_path / "chip").unlink()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not fork_server.can_fork()
