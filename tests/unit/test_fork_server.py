"""The server that engines are forks of: what an engine gets, how its end is told, and who outlives whom."""

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
from workbench.cluster import fork_server
from workbench.cluster.fork_server import Forked, ForkServer

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60.0
SERVER = """
import os, sys, threading, time
from workbench.cluster import fork_server

def live():
    print(sys.argv[1:], os.environ.get("COLOUR"), os.environ.get("GONE"), os.getcwd(), os.getsid(0) == os.getpid(),
          threading.active_count(), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if "raises" in sys.argv:
        raise ValueError("no engine")
    if "ends" in sys.argv:
        os._exit(7)
    time.sleep(600)

fork_server.LOADED = ("numpy",)
fork_server.serve(live)
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[ForkServer, Callable[..., Forked]]]:
    """A server, and what has it fork an engine by name; all are ended afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GONE", "still there")
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    noted: list[Any] = []
    server, forked = ForkServer(process, lambda *told: noted.append(told)), list[Forked]()

    def fork(what: str, *arguments: str) -> Forked:
        forked.append(server.fork(what, list(arguments), tmp_path / f"{what}.log"))
        return forked[-1]

    server.told = noted  # type: ignore[attr-defined]
    yield server, fork
    for one in forked:
        one.kill()
    process.kill()
    assert until(lambda: server.over, BOUND)
    process.wait(BOUND)


def there(one: Forked) -> Forked:
    assert until(lambda: one.pid > 0, BOUND)
    return one


def test_an_engine_has_what_the_kernel_has_now_and_how_it_ended_is_told(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, fork = served
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.delenv("GONE")
    monkeypatch.chdir(tmp_path)
    assert fork("engine 0", "--first", "ends").wait(BOUND) == 7
    said = (tmp_path / "engine 0.log").read_text().splitlines()
    assert said == [f"['--first', 'ends'] green None {tmp_path} True 1", "to stderr"]
    assert fork("engine 1", "raises").wait(BOUND) == 1
    assert "ValueError: no engine" in (tmp_path / "engine 1.log").read_text()
    killed = there(fork("engine 2"))
    assert killed.poll() is None and not killed.unheard
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.05)
    killed.kill()
    assert killed.wait(BOUND) == killed.poll() == -signal.SIGKILL
    assert ["engine 2", [killed.pid, killed.created]] in [list(one) for one in server.told]


def test_one_that_is_not_wanted_any_more_before_it_came_is_ended_as_it_comes(served: Any) -> None:
    server, fork = served
    server.process.send_signal(signal.SIGSTOP)
    late = fork("engine 0")
    late.kill()
    assert not late.pid and late.poll() is None
    server.process.send_signal(signal.SIGCONT)
    assert late.wait(BOUND) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["its input ends", "it is told to end"])
def test_it_ends_after_its_engines_and_forks_no_more(served: Any, how: str) -> None:
    server, fork = served
    one = there(fork("engine 0"))
    server.process.stdin.close() if how == "its input ends" else server.process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.3)
    assert psutil.Process(one.pid).is_running() and one.poll() is None
    one.send_signal(signal.SIGTERM)
    assert one.wait(BOUND) == -signal.SIGTERM
    assert server.process.wait(BOUND) == 0
    assert until(lambda: server.over, BOUND)


def test_engines_outlive_a_server_that_is_killed_and_nobody_says_how_they_end(served: Any) -> None:
    server, fork = served
    one = there(fork("engine 0"))
    server.process.kill()
    assert until(lambda: one.unheard, BOUND)
    assert one.poll() is None and psutil.Process(one.pid).is_running()
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.05)
    os.kill(one.pid, signal.SIGKILL)
    assert one.wait(BOUND) is None
    assert until(lambda: server.over, BOUND)
    assert fork("engine 1").wait(BOUND) == -signal.SIGKILL, "nobody forks it"


def test_a_server_that_ends_before_it_forked_ends_those_that_were_to_come(served: Any) -> None:
    server, fork = served
    server.process.send_signal(signal.SIGSTOP)
    late = fork("engine 0")
    server.process.kill()
    assert late.wait(BOUND) == late.poll() == -signal.SIGKILL and not late.pid


def test_no_forks_beside_chips_nor_on_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fork_server, "CHIPS", (str(tmp_path / "chip"),))
    monkeypatch.setattr(sys, "platform", "linux")
    assert fork_server.usable()
    (tmp_path / "chip").touch()
    assert not fork_server.usable()
    (tmp_path / "chip").unlink()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not fork_server.usable()
