"""Starts and ends a lab's processes: one controller, one engine per rank, and the guard.

It notes each process in the lab's state, and signals only these, by pid and create time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from workbench.cluster.processes.fork_server import NO_THREADS_ENVIRONMENT, ForkedEngine, ForkServer, can_fork
from workbench.cluster.processes.lab_place import ClusterError, LabPlace, alive
from workbench.cluster.processes.ports import is_taken, list_listened, list_ports
from workbench.cluster.processes.process_logs import describe_exit_code, make_log_path, read_log_tail

_HERE = Path(__file__).parent
FEW_ARENAS_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2"
}  # else threads keep memory that other threads freed: 40 MB after 500 live changes
MAX_CONTROLLERS = 4  # tries, if ports are taken


def loopback_name() -> str:
    """Returns the loopback interface (lo, lo0)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "127.0.0.1" for a in addresses):
            return name
    return "lo"


def start_guard(place: LabPlace) -> subprocess.Popen[bytes]:
    """The guard ends the lab's processes after this one. Keep its stdin open."""
    command = [sys.executable, "-S", "-E", "-s", str(_HERE / "guard.py"), str(place.file)]
    command += [str(Path(psutil.__file__).parents[1]), str(os.getpid())]
    return _open_process(place, "guard", command, subprocess.PIPE, {})


_detached: list[subprocess.Popen[bytes] | ForkedEngine] = []  # of detached labs


class LabProcesses:
    """Controller and engines, as children of this process."""

    def __init__(self, place: LabPlace) -> None:
        self.place = place
        self.started: dict[str, subprocess.Popen[bytes] | ForkedEngine] = {}
        self._server: ForkServer | None = None
        self._closed = False
        self._controllers = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Notes a starting process, then prevents further starts."""
        with self._lock:
            self._closed = True

    def reap_children(self) -> None:
        """Leaves no zombies."""
        until = time.monotonic() + 5.0
        for child in self.started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # the lab must still release the rest
                child.wait(max(until - time.monotonic(), 0.0))

    def start_lab(self, ranks: int) -> None:
        """Engines load torch while the controller starts."""
        self._lock_up()
        self._start_controller()
        for number in range(ranks):
            self.start_engine(number)

    def _start_controller(self) -> None:
        """The controller keeps a silent engine for an hour; `ProcessHealth` reports dead ones."""
        self._spawn_process(
            "controller",
            [
                *self._common_arguments,
                "--IPController.use_threads=True",
                "--IPController.broadcast_scheduler_depth=0",
                "--nodb",
                "--HeartMonitor.period=200",
                "--HeartMonitor.max_heartmonitor_misses=18000",
            ],
            {},
        )
        self._controllers += 1

    @property
    def _common_arguments(self) -> list[str]:
        return [f"--profile-dir={self.place.path}", "--log-level=30"]

    def start_engine(self, number: int) -> None:
        """Starts the engine with the ipyparallel id `number`, as a fork if possible."""
        env = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": loopback_name(),
            **FEW_ARENAS_ENVIRONMENT,
        }
        arguments = [
            *self._common_arguments,
            f"--file={self.introduction_file}",
            f"--IPEngine.id={number}",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.wait_for_url_file=60",
            "--IPEngine.timeout=60",
            "--IPEngine.max_heartbeat_misses=1000",
        ]
        if can_fork():
            self._fork_engine(f"engine {number}", arguments, env)
        else:
            self._spawn_process(f"engine {number}", arguments, env)

    @property
    def next_engine(self) -> int:
        """A number that no engine of any kernel has had."""
        noted = [what.split() for what in [*self.started, *(p[2] for p in self.place.state.get("processes", []))]]
        return 1 + max((int(words[1]) for words in noted if words[0] == "engine"), default=-1)

    def dismiss_engine(self, number: int) -> None:
        if child := self.started.get(f"engine {number}"):
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5 if child.pid else 0)  # unforked engines end as they appear

    def _lock_up(self) -> None:
        """The controller encrypts and signs. No command line shows the key."""
        config = self.place.path / "ipcontroller_config.py"
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            key = secrets.token_hex(32).encode()
            file.write(f"c = get_config()\nc.IPController.enable_curve = True\nc.Session.key = {key!r}\n")

    def _spawn_process(self, what: str, arguments: list[str], env: dict[str, str], pipes: bool = False) -> Any:
        """pipes: for input and output"""
        command = [sys.executable, str(_HERE / "boot.py"), what.split()[0], str(self.place.file), *arguments]
        with self._lock:
            self._refuse_closed()
            child = _open_process(
                self.place, what, command, subprocess.PIPE if pipes else subprocess.DEVNULL, env, pipes
            )
            self.started[what] = child
            self.place.add_process([child.pid, psutil.Process(child.pid).create_time()], what)
        return child

    def _fork_engine(self, what: str, arguments: list[str], env: dict[str, str]) -> None:
        if self._server is None or self._server.is_over:
            self._server = ForkServer(
                self._spawn_process("engines", [], {**env, **NO_THREADS_ENVIRONMENT}, pipes=True), self._note_process
            )
        with self._lock:
            self._refuse_closed()
            engine = self.started[what] = ForkedEngine(what)
        self._server.fork_engine(engine, arguments, make_log_path(self.place, what), env)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClusterError("the lab was closed while it came up")

    def _note_process(self, what: str, process: list[float]) -> None:
        with self._lock, contextlib.suppress(OSError, ClusterError):  # no directory, or a kept lock
            if not self._closed:  # else `end_processes` finds it as the server's child
                self.place.add_process(process, what)

    @property
    def introduction_file(self) -> Path:
        """The file that tells engines the controller's address."""
        return self.place.path / "engine.json"

    def introduce_controller(self) -> bool:
        """Shows the controller's address to engines once its files are complete.

        A controller that lost a port ends or lacks a scheduler. Another one then starts. See `list_ports`.
        """
        written = [self.place.path / "security" / f"ipcontroller-{whose}.json" for whose in ("client", "engine")]
        try:
            texts = [file.read_text() for file in written]
            asked = set[int]().union(*(list_ports(json.loads(text)) for text in texts))
        except (OSError, ValueError):
            asked = set()
        if self._lost_port(asked):
            self._another_controller(written)
            return False
        if not asked or asked - list_listened(self.started["controller"].pid):
            return False
        draft = self.introduction_file.with_suffix(".draft")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(texts[1])
        draft.replace(self.introduction_file)
        return True

    def _lost_port(self, asked: set[int]) -> bool:
        """Whether the controller lost a port to another process."""
        controller = self.started["controller"]
        if controller.poll() is not None:
            return "Address already in use" in read_log_tail(self.place, "controller")
        others = [port for port in asked - list_listened(controller.pid) if is_taken(port)]
        return bool(set(others) - list_listened(controller.pid))  # it may have bound some

    def _another_controller(self, written: list[Path]) -> None:
        if self._controllers == MAX_CONTROLLERS:
            raise ClusterError(f"{MAX_CONTROLLERS} controllers in a row lost ports that they had chosen to other "
                               f"processes.{read_log_tail(self.place, 'controller')}")  # fmt: skip
        controller = self.started["controller"]
        if controller.poll() is None:
            for child in _list_children(controller.pid):
                with contextlib.suppress(psutil.Error):  # it may have ended
                    child.kill()
            controller.kill()
            controller.wait(5)
        for file in written:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it must not explain the next controller's end
            make_log_path(self.place, "controller").rename(make_log_path(self.place, f"controller {self._controllers}"))
        self._start_controller()

    def note_children(self) -> None:
        """Notes the controller's children, to find them even without it."""
        noted = {p[0] for p in self.place.state["processes"]}
        for child in _list_children(self.started["controller"].pid):
            if child.pid not in noted:
                with contextlib.suppress(psutil.Error):
                    self.place.add_process([child.pid, child.create_time()], "controller's child")

    def check_children(self) -> None:
        """Raises ClusterError with a log's tail if a process has ended, except a controller that lost a port."""
        for what, child in self.started.items():
            if (code := child.poll()) is not None or (isinstance(child, ForkedEngine) and child.is_lost):
                if what == "controller" and not self.introduction_file.exists() and self._lost_port(set()):
                    continue
                how = describe_exit_code(code)
                until = "they were" if what == "engines" else "it was"
                raise ClusterError(f"{what} ended with {how} before {until} up.{read_log_tail(self.place, what)}")


def detach_processes(owned: LabProcesses | None) -> None:
    """Detaches the processes from their lab, still as children of this one."""
    if owned:
        owned.close()
        _detached.extend(owned.started.values())


def end_processes(place: LabPlace, patience: float = 1.0) -> None:
    """Ends the lab's processes and their children, by SIGTERM, after `patience` s by SIGKILL."""
    with contextlib.suppress(OSError, ClusterError):  # no directory, or a stopped kernel's lock
        place.write_state(ends=True)  # else a training engine sees a preemption
    found = _list_living(place)
    _send_signal(found, signal.SIGTERM)
    _, left = psutil.wait_procs(list(found.values()), timeout=patience)
    late = {p.pid: p for p in left} | _list_living(place)  # includes later forks
    _send_signal(late, signal.SIGKILL)
    psutil.wait_procs(list(late.values()), timeout=5.0)
    _detached[:] = [child for child in _detached if child.poll() is None]


def _list_living(place: LabPlace) -> dict[int, psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for pid, created, _ in place.state.get("processes", []):
        if alive([pid, created]):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                found[process.pid] = process
                found.update({p.pid: p for p in process.children(recursive=True)})
    return found


def _list_children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _send_signal(processes: dict[int, psutil.Process], what: int) -> None:
    for process in processes.values():
        try:
            process.send_signal(what)
        except psutil.Error:
            pass


def _open_process(
    place: LabPlace, what: str, command: list[str], stdin: int, env: dict[str, str], says: bool = False
) -> subprocess.Popen[bytes]:
    """The child has its own log file and session, out of reach of interrupts. says: whether we read its output"""
    with open(make_log_path(place, what), "ab") as log:
        return subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE if says else log, stderr=log, start_new_session=True,
            env={**os.environ, **env},
        )  # fmt: skip


def measure_memory(place: LabPlace) -> dict[str, float]:
    """Returns each process's MB: its proportional share, or resident if the system knows no other."""
    out = {}
    for pid, created, what in place.state.get("processes", []):
        if alive([pid, created]):
            with contextlib.suppress(psutil.Error):  # it may end
                info = psutil.Process(int(pid)).memory_full_info()
                out[f"{what} ({int(pid)})"] = getattr(info, "pss", info.rss) / 1e6
    return out


def wait_for(condition: Callable[[], bool], seconds: float, every: float = 0.05) -> bool:
    """Returns whether `condition()` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
