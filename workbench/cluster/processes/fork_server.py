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

from workbench.cluster.processes.place import alive

LOADED = (  # torch._dynamo and ipykernel.debugger: torch and ipykernel load them later, in every engine
    "torch", "torch._dynamo", "ipyparallel.engine.app", "ipykernel.debugger", "workbench.engine.rank.session",
    "workbench.cluster.engines.worker",
)  # fmt: skip
CHIPS = ("/dev/nvidiactl", "/dev/kfd")  # where there are any, whoever asks for them must not fork afterwards
QUIET = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's allocator starts a thread otherwise
LOOK = 0.05  # seconds between two looks at an engine that is waited for
TELLS = 1.0  # seconds that a server has to tell how an engine ended that is gone
UNTOLD = 1  # how an engine ended that was never forked

_log = logging.getLogger(__name__)


def usable() -> bool:
    """Whether engines can be forked here: not on a Mac, whose libraries do not outlive it, nor beside chips."""
    return sys.platform == "linux" and not any(map(os.path.exists, CHIPS))


# -- in the kernel --


class Forked:
    """An engine that a server forks, to be asked as a Popen is. `pid` is 0 until it has been forked."""

    def __init__(self, what: str) -> None:
        self.what, self.pid, self.created = what, 0, 0.0
        self.returncode: int | None = None
        self.over = threading.Event()  # it has ended, or nobody will tell any more
        self._unwanted = False
        self._missed: float | None = None  # since when it is gone and nobody has told how it ended

    @property
    def unheard(self) -> bool:
        """Is nobody left who could tell how this one ends?"""
        return self.over.is_set() and self.returncode is None

    @property
    def lost(self) -> bool:
        """Has it ended, and nobody can tell how?"""
        return self.unheard and not self._lives()

    def poll(self) -> int | None:
        """How it ended, if it has; of a server that stands still nothing is expected for longer than `TELLS`."""
        if self.returncode is None and self.pid and not self.over.is_set() and not self._lives():
            self._missed = self._missed or time.monotonic()
            if time.monotonic() - self._missed > TELLS:
                self.over.set()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """How it ended; None where nobody can tell. Raises TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None and not self.lost:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(self.what, timeout or 0.0)
            time.sleep(LOOK) if self.over.is_set() else self.over.wait(LOOK)
        return self.returncode

    def send_signal(self, what: int) -> None:
        """One that is still to come gets SIGKILL when it has."""
        if not self.pid:
            self._unwanted = True  # then is looked again: it may be coming right now
        if self._lives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, what)

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
        self.env = dict(os.environ)  # as the server has it, but for what it was given besides
        self.over = False  # does it fork no more?
        self._asked: dict[str, Forked] = {}
        self._by_pid: dict[int, Forked] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._hear, name="fork server", daemon=True).start()

    def fork(self, engine: Forked, arguments: list[str], log: Path, env: Mapping[str, str]) -> None:
        """Orders an engine, with ipyparallel's arguments. log: where it writes what it prints; env: what it has so"""
        order = {"what": engine.what, "arguments": arguments, "log": str(log), "cwd": _here(),
                 "env": {**self._changed(), **env}}  # fmt: skip
        with self._lock:
            self._asked[engine.what] = engine
            if self.over or self.process.stdin is None:
                return engine.ended(UNTOLD)
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is heard on the other pipe
                self.process.stdin.write(json.dumps(order).encode() + b"\n")
                self.process.stdin.flush()

    def _changed(self) -> dict[str, str | None]:
        """What the environment has that it had not when the server was started; None: what it has no longer."""
        gone = dict.fromkeys(self.env.keys() - os.environ.keys())
        return {**gone, **{name: x for name, x in os.environ.items() if self.env.get(name) != x}}

    def _hear(self) -> None:
        for line in self.process.stdout or ():
            try:
                self._heard(**json.loads(line))
            except ValueError:  # what a site's own modules print before the server has its output to itself
                _log.info("a fork server printed %r", line)
            except Exception:
                _log.exception("a fork server said %r", line)
        code = self.process.wait()
        self._no_more(code)
        for engine in self._asked.values():
            if not engine.over.is_set():
                engine.ended(None)

    def _heard(self, what: str = "", pid: int = 0, code: int | None = None, closing: bool = False) -> None:
        if closing:
            self._no_more(UNTOLD)
        elif code is not None:
            (self._by_pid.pop(pid) if pid else self._asked[what]).ended(code)
        else:
            engine = self._by_pid[pid] = self._asked[what]
            if engine.come(pid):
                self._noted(what, [pid, engine.created])

    def _no_more(self, code: int) -> None:
        """From now on it forks none, and none of those that were to come will."""
        with self._lock:
            self.over = True
            with contextlib.suppress(OSError):  # it does not take any more what was to be written
                self.process.stdin.close()  # type: ignore[union-attr]
            if self.process.returncode is not None:
                self.process.stdout.close()  # type: ignore[union-attr]
            for engine in self._asked.values():
                if not engine.pid and not engine.over.is_set():
                    engine.ended(code or UNTOLD)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # somebody has removed it
        return os.sep


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
        if told and orders:
            orders = []
            _say(out, closing=True)
        if not set(orders) & set(ready):
            continue
        new = os.read(orders[0], 1 << 16)
        *lines, rest = (rest + new).split(b"\n")
        orders = orders if new else []
        for line in lines:
            if told:  # who ends the lab looks for what has been forked
                break
            order = json.loads(line)
            try:
                pid = os.fork()
            except OSError:  # too many processes, or too little memory, for this one
                traceback.print_exc()
                _say(out, what=order["what"], code=1)
                continue
            if not pid:
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
