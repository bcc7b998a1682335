"""Forks engines from one process, so that it loads their modules once.

Each line that the server reads orders an engine. It reports the engine's process and its end, which only a parent
learns. It has no threads. It ends at SIGTERM or end of input, after its engines.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil

from workbench.cluster.processes.lab_place import alive

PRELOADED_MODULES = (  # else torch and ipykernel load torch._dynamo and ipykernel.debugger in every engine
    "torch", "torch._dynamo", "ipyparallel.engine.app", "ipykernel.debugger", "workbench.engine.rank.session",
    "workbench.cluster.engines.engine_server",
)  # fmt: skip
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")  # a process that looked for these must not fork
NO_THREADS_ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # or pyarrow's allocator starts a thread
POLL_INTERVAL = 0.05  # seconds
REPORT_TIMEOUT = 1.0  # seconds, for an engine's end
NEVER_FORKED = 1  # exit code

_log = logging.getLogger(__name__)


def can_fork() -> bool:
    """False on macOS, where libraries break in a fork, and with GPUs."""
    return sys.platform == "linux" and not any(map(os.path.exists, GPU_DEVICES))


# -- in the kernel --


class ForkedEngine:
    """An engine that a server forks, with a Popen's methods. `pid` is 0 until the fork."""

    def __init__(self, what: str) -> None:
        self.engine_name, self.pid, self.created = what, 0, 0.0
        self.returncode: int | None = None
        self.end_event = threading.Event()  # ended, or without further reports
        self._unwanted = False
        self._unreported_since: float | None = None  # since when it is gone unreported

    @property
    def is_unreported(self) -> bool:
        return self.end_event.is_set() and self.returncode is None

    @property
    def is_lost(self) -> bool:
        return self.is_unreported and not self._is_alive()

    def poll(self) -> int | None:
        """Returns the exit code or None. After the end, allows `REPORT_TIMEOUT` s for the report."""
        if self.returncode is None and self.pid and not self.end_event.is_set() and not self._is_alive():
            self._unreported_since = self._unreported_since or time.monotonic()
            if time.monotonic() - self._unreported_since > REPORT_TIMEOUT:
                self.end_event.set()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the exit code; None if no report comes. Raises TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None and not self.is_lost:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(self.engine_name, timeout or 0.0)
            time.sleep(POLL_INTERVAL) if self.end_event.is_set() else self.end_event.wait(POLL_INTERVAL)
        return self.returncode

    def send_signal(self, what: int) -> None:
        """An engine not yet forked gets SIGKILL later."""
        if not self.pid:
            self._unwanted = True  # first: the engine may appear now
        if self._is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, what)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _is_alive(self) -> bool:
        return bool(self.pid) and self.returncode is None and alive([self.pid, self.created])

    def take_pid(self, pid: int) -> bool:
        """Returns whether the process exists."""
        with contextlib.suppress(psutil.Error):
            self.created = psutil.Process(pid).create_time()
        self.pid = pid
        if self._unwanted:
            self.kill()
        return bool(self.created)

    def take_code(self, code: int | None) -> None:
        self.returncode = code
        self.end_event.set()


class ForkServer:
    """Orders engines from `process`, a server with pipes.

    noted: called with each engine's name and process
    """

    def __init__(self, process: subprocess.Popen[bytes], noted: Callable[[str, list[float]], None]) -> None:
        self.process, self._note_process = process, noted
        self.env = dict(os.environ)
        self.is_over = False
        self._ordered_engines: dict[str, ForkedEngine] = {}
        self._by_pid: dict[int, ForkedEngine] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read_reports, name="fork server", daemon=True).start()

    def fork_engine(self, engine: ForkedEngine, arguments: list[str], log: Path, env: Mapping[str, str]) -> None:
        """arguments: ipyparallel's; log: for the engine's output; env: further variables"""
        order = {"what": engine.engine_name, "arguments": arguments, "log": str(log), "cwd": _find_folder(),
                 "env": {**self._changed_environment(), **env}}  # fmt: skip
        with self._lock:
            self._ordered_engines[engine.engine_name] = engine
            if self.is_over or self.process.stdin is None:
                return engine.take_code(NEVER_FORKED)
            with contextlib.suppress(BrokenPipeError):  # its end shows on the other pipe
                self.process.stdin.write(json.dumps(order).encode() + b"\n")
                self.process.stdin.flush()

    def _changed_environment(self) -> dict[str, str | None]:
        """Returns variables changed since the server's start; None: removed."""
        gone = dict.fromkeys(self.env.keys() - os.environ.keys())
        return {**gone, **{name: x for name, x in os.environ.items() if self.env.get(name) != x}}

    def _read_reports(self) -> None:
        for line in self.process.stdout or ():
            try:
                self._take_report(**json.loads(line))
            except ValueError:  # from a site's modules, before the server redirects its output
                _log.info("a fork server printed %r", line)
            except Exception:
                _log.exception("a fork server said %r", line)
        code = self.process.wait()
        self._no_more(code)
        self.process.stdout.close()  # type: ignore[union-attr]
        for engine in self._ordered_engines.values():
            if not engine.end_event.is_set():
                engine.take_code(None)

    def _take_report(self, what: str = "", pid: int = 0, code: int | None = None, closing: bool = False) -> None:
        if closing:
            self._no_more(NEVER_FORKED)
        elif code is not None:
            (self._by_pid.pop(pid) if pid else self._ordered_engines[what]).take_code(code)
        else:
            engine = self._by_pid[pid] = self._ordered_engines[what]
            if engine.take_pid(pid):
                self._note_process(what, [pid, engine.created])

    def _no_more(self, code: int) -> None:
        """Closes the server. Engines not yet forked count as ended."""
        with self._lock:
            self.is_over = True
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # type: ignore[union-attr]
            for engine in self._ordered_engines.values():
                if not engine.pid and not engine.end_event.is_set():
                    engine.take_code(code or NEVER_FORKED)


def _find_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return os.sep


# -- in the server --


def serve_forks(live: Callable[[], NoReturn]) -> None:
    """Forks engines on order; each calls `live`. Returns at SIGTERM or end of input, after all engines."""
    out = os.dup(1)
    os.dup2(2, 1)  # keeps prints of modules out of the pipe
    gc.disable()
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to shared pages
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda what, _: told.append(what))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    living, rest = set[int](), b""
    orders = [sys.stdin.fileno()]
    while orders or living:
        ready = select.select([reading, *orders], [], [])[0]
        if reading in ready:
            os.read(reading, 4096)
        for pid in sorted(living):
            if (done := os.waitpid(pid, os.WNOHANG))[0]:
                living.discard(pid)
                _send_report(out, pid=pid, code=os.waitstatus_to_exitcode(done[1]))
        if told and orders:
            orders = []
            _send_report(out, closing=True)
        if not set(orders) & set(ready):
            continue
        new = os.read(orders[0], 1 << 16)
        *lines, rest = (rest + new).split(b"\n")
        orders = orders if new else []
        for line in lines:
            if told:  # the kernel now looks for all forks
                break
            order = json.loads(line)
            try:
                pid = os.fork()
            except OSError:  # too many processes, or little memory
                traceback.print_exc()
                _send_report(out, what=order["what"], code=1)
                continue
            if not pid:
                _become_engine(order, live, (reading, writing, out))
            living.add(pid)
            _send_report(out, what=order["what"], pid=pid)


def _send_report(out: int, **what: Any) -> None:
    with contextlib.suppress(OSError):  # the kernel is gone
        os.write(out, json.dumps(what).encode() + b"\n")


def _become_engine(order: dict[str, Any], live: Callable[[], NoReturn], pipes: tuple[int, ...]) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for what in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(what, signal.SIG_DFL)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for mine, its in ((0, null), (1, log), (2, log)):
            os.dup2(its, mine)
        for one in (*pipes, log, null):
            os.close(one)
        with contextlib.suppress(OSError):
            os.chdir(order["cwd"])
        for name, value in order["env"].items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        sys.argv[1:] = order["arguments"]
        random.seed()
        importlib.import_module("numpy").random.seed()
        gc.enable()
        live()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
