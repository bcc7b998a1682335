"""Engines as forks of one process that has loaded what they need, so that loading is paid for once and not per rank.

The server is one of the lab's processes. Each line that it reads is an order for an engine; it says which process that
is, and later how it ended, for the system tells that to a parent alone. It has no threads of its own, ends when it is
told to (SIGTERM) or its input does, and then only after its engines.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from workbench.cluster.place import alive

LOADED = ("torch", "ipyparallel.engine.app", "workbench.engine.session", "workbench.cluster.worker")
CHIPS = ("/dev/nvidiactl", "/dev/kfd")  # where there are any, whoever asks for them must not fork afterwards
QUIET = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's allocator starts a thread otherwise
LOOK = 0.05  # seconds between two looks at an engine of which nobody tells


def usable() -> bool:
    """Whether engines can be forked here: not on a Mac, whose libraries do not outlive it, nor beside chips."""
    return sys.platform == "linux" and not any(map(os.path.exists, CHIPS))


# -- in the kernel --


class Forked:
    """An engine that the server forks, to be asked as a Popen is. `pid` is 0 until it has been forked."""

    def __init__(self, server: ForkServer) -> None:
        self.server, self.pid, self.created = server, 0, 0.0
        self.returncode: int | None = None
        self.over = threading.Event()  # it has ended, or nobody will tell any more
        self._unwanted = False

    @property
    def unheard(self) -> bool:
        """Is nobody left who could tell how this one ends?"""
        return self.over.is_set() and self.returncode is None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """How it ended; None where nobody can tell. Raises TimeoutExpired."""
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while not self.over.wait(max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))) or (
            self.unheard and self._lives()
        ):
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout or 0.0)
            time.sleep(LOOK)
        return self.returncode

    def send_signal(self, what: int) -> None:
        """One that is still to come gets SIGKILL when it has."""
        if self._lives():
            os.kill(self.pid, what)
        self._unwanted |= not self.pid

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _lives(self) -> bool:
        return bool(self.pid) and self.returncode is None and alive([self.pid, self.created])

    def come(self, pid: int) -> bool:
        """It is this process, as far as that can still be said."""
        with contextlib.suppress(psutil.Error):
            self.created = psutil.Process(pid).create_time()
        self.pid = pid
        if self._unwanted:
            self.kill()
        return bool(self.created)

    def ended(self, code: int | None) -> None:
        self.returncode = code
        self.over.set()


class ForkServer:
    """Has engines forked by `process`, a server whose ends are pipes. noted: is told the name and process of each."""

    def __init__(self, process: subprocess.Popen[bytes], noted: Callable[[str, list[float]], None]) -> None:
        self.process, self._noted = process, noted
        self.env = dict(os.environ)  # as the server has it
        self.over = False
        self._asked: dict[str, Forked] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._hear, name="fork server", daemon=True).start()

    def fork(self, what: str, arguments: list[str], log: Path) -> Forked:
        """An engine to come, by name, with ipyparallel's arguments; where it writes what it prints."""
        order = {"what": what, "arguments": arguments, "log": str(log), "cwd": os.getcwd(), "env": self._changed()}
        engine = self._asked[what] = Forked(self)
        with self._lock:
            if self.over or self.process.stdin is None:
                engine.ended(self.process.returncode)
                return engine
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is heard on the other pipe
                self.process.stdin.write(json.dumps(order).encode() + b"\n")
                self.process.stdin.flush()
        return engine

    def _changed(self) -> dict[str, str | None]:
        """What the environment has that it had not when the server was started; None: what it has no longer."""
        gone = dict.fromkeys(self.env.keys() - os.environ.keys())
        return {**gone, **{name: x for name, x in os.environ.items() if self.env.get(name) != x}}

    def _hear(self) -> None:
        try:
            by_pid: dict[int, Forked] = {}
            for line in self.process.stdout or ():
                said = json.loads(line)
                if "code" in said:
                    by_pid.pop(said["pid"]).ended(said["code"])
                else:
                    engine = by_pid[said["pid"]] = self._asked[said["what"]]
                    if engine.come(said["pid"]):
                        self._noted(said["what"], [engine.pid, engine.created])
        finally:
            self._end(self.process.wait())

    def _end(self, code: int) -> None:
        with self._lock:
            self.over = True
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):  # it does not take any more what was to be written
                    pipe.close()  # type: ignore[union-attr]
            for engine in self._asked.values():
                if not engine.over.is_set():
                    engine.ended(None if engine.pid else code)


# -- in the server --


def serve(live: Callable[[], NoReturn]) -> None:
    """Forks engines, which `live`, as they are ordered; until it is told to end and all of them have."""
    out = os.dup(1)
    os.dup2(2, 1)  # what is printed while modules are loaded goes where all that the server prints goes
    gc.disable()
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared is left where it is: a collection would write to its pages
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
                _say(out, pid=pid, code=os.waitstatus_to_exitcode(done[1]))
        if told:
            orders = []
        if not set(orders) & set(ready):
            continue
        new = os.read(orders[0], 1 << 16)
        *lines, rest = (rest + new).split(b"\n")
        orders = orders if new else []
        for line in lines:
            order = json.loads(line)
            if not (pid := os.fork()):
                _become(order, live, (reading, writing, out))
            living.add(pid)
            _say(out, what=order["what"], pid=pid)


def _say(out: int, **what: Any) -> None:
    with contextlib.suppress(OSError):  # the kernel is gone; its engines may go on
        os.write(out, json.dumps(what).encode() + b"\n")


def _become(order: dict[str, Any], live: Callable[[], NoReturn], pipes: tuple[int, ...]) -> NoReturn:
    """The fork's own life: nothing that the server has goes on in it."""
    try:
        signal.set_wakeup_fd(-1)
        for what in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(what, signal.SIG_DFL)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for mine, its in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(its, mine)
        for pipe in pipes:
            os.close(pipe)
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
