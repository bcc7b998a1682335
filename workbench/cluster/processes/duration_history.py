"""Remembers durations on this machine, in the user's data directory, to predict later ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.cluster.processes.lab_place import runs_dir
from workbench.record.folders import make_private_folder
from workbench.record.store import write_atomically
from workbench.settings.progress import Doing, doing, seen

POLL_INTERVAL = 0.2  # seconds


@contextmanager
def time_work(what: str) -> Iterator[Doing]:
    """Shows that `what` is under way, with its last duration, and notes its new one."""
    began = time.monotonic()
    with doing(what, usual=read_duration(what)) as work:
        yield work
    note_duration(what, time.monotonic() - began)


def wait_with_progress(ready: threading.Event, timeout: float | None, what: str) -> bool:
    """Returns whether `ready` was set in time. At a prompt, shows how long `what` takes."""
    if ready.is_set() or not seen():
        return ready.wait(timeout)
    until = None if timeout is None else time.monotonic() + timeout
    with doing(what, usual=read_duration(what)) as work:
        while not ready.wait(POLL_INTERVAL):
            work.tell()
            if until is not None and time.monotonic() > until:
                return False
    return True


def describe_start(count: int, more: str = "") -> str:
    """Names the work.

    >>> describe_start(4), describe_start(1, " more")
    ('starting 4 engines', 'starting 1 engine more')
    """
    return f"starting {count} engine{'s' * (count != 1)}{more}"


def read_duration(what: str) -> float | None:
    """Returns the last seconds of `what`, or None."""
    found = _read().get(what)
    return float(found) if isinstance(found, int | float) and found > 0 else None


def note_duration(what: str, seconds: float) -> None:
    """Ignores a disk that refuses the note."""
    with suppress(OSError):
        make_private_folder(_file().parent)
        write_atomically(_file(), json.dumps({**_read(), what: round(seconds, 2)}))


def _file() -> Path:
    return runs_dir().parent / "usual.json"


def _read() -> dict[str, object]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
