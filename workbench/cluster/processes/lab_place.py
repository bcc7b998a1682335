"""A lab's private directory, 0700, with the state that survives the kernel.

Only its `lab.json` says which kernel owns which processes. This module touches no process.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from workbench.record.folders import ALLOW, is_allowed, others_can_write
from workbench.record.process import alive as alive
from workbench.record.process import this_process as this_process

LOCK_TIMEOUT = 10.0  # seconds for a kernel that changes the state of the same lab
POLL_INTERVAL = 0.02  # seconds


class ClusterError(RuntimeError):
    """A request that the engines cannot fulfil. The message names the engine, the reason and a remedy.

    What to do: follow the remedy. `lab.status` and `lab.notes` show the engines and their errors.
    """


def runtime_root() -> Path:
    """Returns the user's runtime directory, 0700. Raises ClusterError if another user could change or replace it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns if XDG_RUNTIME_DIR is unset
        path = Path(os.environ.get("WORKBENCH_RUNTIME_DIR") or platformdirs.user_runtime_dir("training-workbench"))
    if not _make_private(path):
        path = Path(platformdirs.user_data_dir("training-workbench")) / "runtime"
        if not _make_private(path):
            raise ClusterError(
                f"{path}: belongs to another user, or other users can write to its parent folder, so it is not "
                f"private; set WORKBENCH_RUNTIME_DIR to another folder, or set {ALLOW}=1 if you trust them"
            )
    return path


def _make_private(path: Path) -> bool:
    """Returns whether only this user can change `path`.

    It must be this user's. The folder around it must be this user's or root's, and other users must not be able to
    rename its contents. A user can waive both conditions, see `workbench.record.folders`.
    """
    try:
        for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    mine, around = path.lstat(), path.parent.stat()
    user = os.getuid() if hasattr(os, "getuid") else mine.st_uid
    if not stat.S_ISDIR(mine.st_mode) or mine.st_uid != user:
        return False
    swappable = others_can_write(around) and not around.st_mode & stat.S_ISVTX
    if (around.st_uid not in (user, 0) or swappable) and not is_allowed():
        return False
    path.chmod(0o700)
    return True


def runs_dir() -> Path:
    """Returns the default folder for runs, in this user's data directory."""
    return Path(platformdirs.user_data_dir("training-workbench")) / "runs"


class LabPlace:
    """One lab's private directory and its state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "lab.json"
        self._state: dict[str, Any] = {}  # for when the file is unreadable
        self._writing = threading.Lock()  # for spare engines' thread

    @classmethod
    def make_place(cls, name: str) -> LabPlace:
        remove_old()
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:24]
        path = runtime_root() / f"{safe}-{secrets.token_hex(4)}"
        for part in (path, path / "log", path / "security", path / "pid"):
            part.mkdir(mode=0o700)
        place = cls(path)
        place.write_state(schema=1, name=name, owner=this_process(), processes=[], since=time.time())
        return place

    def read_state(self) -> dict[str, Any]:
        """Returns the state on disk, or {}."""
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}

    def write_state(self, **fields: Any) -> None:
        """Changes the state by one atomic replace, readable by this user only."""
        self._change(lambda state: fields)

    def claim_ownership(self) -> None:
        """If two kernels claim the lab at once, one succeeds.

        Raises ClusterError if the lab has a living owner or is gone.
        """
        try:
            self._change(_replace_owner)
        except FileNotFoundError:
            raise self.explain_end() from None

    def explain_end(self) -> ClusterError:
        """Returns the error for a kernel that attaches to a lab that is gone."""
        return ClusterError(f"the lab in {self.path} has ended; start one with Lab(ranks=4)")

    def add_process(self, process: list[float], what: str) -> None:
        self._change(lambda state: {"processes": [*state["processes"], [*process, what]]})

    def drop_process(self, pid: int) -> None:
        self._change(lambda state: {"processes": [p for p in state["processes"] if int(p[0]) != pid]})

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Merges the fields that `change` makes of the newest state. Other kernels wait.

        Raises OSError if it cannot write, and ClusterError if another kernel keeps the lock.
        """
        with self._writing, self._locked():
            state = self.state
            self._state = {**state, **change(state)}
            self._remove_drafts()
            fresh = self.file.with_suffix(f".{os.getpid()}")
            try:
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
                    json.dump(self._state, f)
                os.replace(fresh, self.file)
            finally:
                fresh.unlink(missing_ok=True)

    def _remove_drafts(self) -> None:
        """Removes drafts of kernels that died while writing."""
        for draft in self.path.glob("lab.[0-9]*"):
            if not psutil.pid_exists(int(draft.suffix[1:])):
                draft.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds a lock that all kernels share. Raises ClusterError if another keeps it."""
        import fcntl  # Windows has none, but imports this module

        file = self.path / "lab.lock"
        with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+") as f:
            until = time.monotonic() + LOCK_TIMEOUT
            with suppress(OSError):  # some network file systems have none
                while not _try_lock(f.fileno()):
                    if time.monotonic() > until:
                        raise ClusterError(_name_holder(file, f.read()))
                    time.sleep(POLL_INTERVAL)
            try:
                f.truncate(0)
                f.write(str(os.getpid()))
                f.flush()
                yield
            finally:
                with suppress(OSError):
                    fcntl.flock(f, fcntl.LOCK_UN)  # a fork may share the descriptor

    @property
    def state(self) -> dict[str, Any]:
        """The newest state of any kernel, or the last one read if the file is gone."""
        self._state = self.read_state() or self._state
        return self._state

    def remove_folder(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _try_lock(fd: int) -> bool:
    """Returns False if another descriptor has the lock. Raises OSError if there are no locks."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name_holder(file: Path, pid: str) -> str:
    """Describes a lock's holder, `pid` if the file names it."""
    by = f"process {pid}, which may be stopped; continue it with kill -CONT {pid}, or end it" if pid else (
        "a process that may be stopped; continue it or end it"
    )  # fmt: skip
    return f"{file}: the lab's state cannot be changed; for {LOCK_TIMEOUT:g} s its lock has been held by {by}"


def _replace_owner(state: dict[str, Any]) -> dict[str, Any]:
    if not state:
        raise FileNotFoundError(errno.ENOENT, "the lab has no state file")
    if alive(state["owner"]):
        name = state["name"]
        raise ClusterError(
            f"lab {name!r}: process {int(state['owner'][0])} attached to it at the same moment and owns it now; work "
            f"in that kernel, or call Lab.attach({name!r}) again to follow its run as a guest"
        )
    return {"owner": this_process()}


def check_connection(path: Path) -> None:
    """Raises ClusterError if `path` is not a connection file of ipyparallel's clients."""
    if not path.is_file():
        raise ClusterError(f"cluster={str(path)!r}: there is no such connection file")
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or not {"interface", "registration", "mux", "iopub", "key"} <= about.keys():
        raise ClusterError(
            f"cluster={str(path)!r}: is not a client connection file; ipyparallel writes one, "
            f"ipcontroller-client.json, into the security directory of its profile"
        )


def list_places() -> list[LabPlace]:
    """Returns this user's labs on this machine, newest first."""
    found = [LabPlace(p.parent) for p in runtime_root().glob("*/lab.json")]
    with_state = [p for p in found if p.read_state()]
    return sorted(with_state, key=lambda p: -p.read_state().get("since", 0.0))


def remove_old() -> None:
    """Removes the places of labs that are over."""
    for place in list_places():
        if (state := place.read_state()) and is_over(state):  # another kernel may have removed it
            place.remove_folder()


def is_over(state: dict[str, Any]) -> bool:
    """Whether a lab's owner and its processes here are gone. A detached lab on other hosts is never over."""
    engines = state.get("engines", [])
    here = [p[:2] for p in state["processes"]] + [[e["pid"], e["created"]] for e in engines if e["host"] == host_name()]
    elsewhere = any(e["host"] != host_name() for e in engines) and state["owner"] is None
    return not elsewhere and not alive(state["owner"]) and not any(alive(p) for p in here)


def host_name() -> str:
    """Returns this machine's name."""
    return socket.gethostname()
