"""Which process is meant, and whether it still runs: for whoever wrote down that something belongs to it."""

from __future__ import annotations

import os

import psutil

TOLERANCE = 5.0  # seconds by which two readings of a create time may differ when the clock is set in between
_known: dict[tuple[int, float], psutil.Process] = {}


def this_process() -> list[float]:
    """The present process as [pid, create time]: what tells it from a later one with the same pid."""
    return [os.getpid(), psutil.Process().create_time()]


def alive(process: list[float] | None) -> bool:
    """Whether the process [pid, create time] still runs (a zombie does not).

    The time is compared once; after that psutil knows the process by a clock that nobody sets.
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
