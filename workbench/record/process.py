"""Identifies a process, and whether it still runs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

TOLERANCE = 5.0  # seconds that 2 readings of a create time may differ if the clock was set
_known: dict[tuple[int, float], psutil.Process] = {}
_timeouts = threading.Lock()


def this_process() -> list[float]:
    """Returns `[pid, create time]` of this process. Pids are reused."""
    return [os.getpid(), psutil.Process().create_time()]


def alive(process: list[float] | None) -> bool:
    """Whether the process [pid, create time] still runs. A zombie does not.

    Compares the time once, then relies on psutil. So clock changes do no harm.
    """
    if process is None:
        return False
    key = int(process[0]), process[1]
    try:
        if key not in _known:
            found = psutil.Process(key[0])
            if abs(found.create_time() - key[1]) > TOLERANCE:
                return False
            _known[key] = found
        return _known[key].is_running() and _known[key].status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def borrow_socket(fd: int) -> Iterator[socket.socket]:
    """Yields a socket object for an unchanged descriptor. Raises OSError.

    After `socket.setdefaulttimeout` Python would make it non-blocking, but its owner expects it to block.
    """
    with _timeouts:
        default = socket.getdefaulttimeout()
        socket.setdefaulttimeout(None)
        try:
            borrowed = socket.socket(fileno=fd)
        finally:
            socket.setdefaulttimeout(default)
    try:
        yield borrowed
    finally:
        borrowed.detach()
