"""Guards one lab: ends its processes when the notebook kernel is gone.

The kernel runs this script with the standard library, to keep it tiny; it imports psutil only to end processes. It
awaits the end of its standard input, which the kernel holds, and checks its parent every second. Then it ends the lab's
noted processes and their children, by pid and create time, except for a detached lab.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
import typing

TOLERANCE = 5.0  # seconds that two readings of a create time may differ, if the clock was set
GRACE = 1.0  # seconds from SIGTERM to SIGKILL


def main(file: str, packages: str, kernel: int) -> None:
    """Waits for the kernel's end, then ends what `file` lists."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    while os.getppid() == kernel:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable and not os.read(0, 4096):
            break
    if is_owned(file, kernel):
        sys.path.append(packages)
        end_lab(file)


def is_owned(file: str, kernel: int) -> bool:
    """Whether the dead kernel still owns the lab: not detached, taken over or closed."""
    state = read_state(file)
    return bool(state.get("owner")) and state["owner"][0] == kernel


def read_state(file: str) -> dict[str, typing.Any]:
    """Returns the lab's state, or {}."""
    try:
        with open(file) as f:
            return json.load(f)
    except (OSError, ValueError):
        return {}


def end_lab(file: str) -> None:
    """Ends the state file's processes and their children, then removes the lab's directory."""
    import psutil

    known: dict[tuple[int, float], psutil.Process] = {}
    deadline = time.monotonic() + GRACE
    while True:
        gather_processes(read_state(file).get("processes", []), known)
        living = [p for p in known.values() if is_running(p)]
        if not living:
            break
        for process in living:
            try:
                process.send_signal(signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            except psutil.Error:
                pass
        if time.monotonic() > deadline + GRACE + 2:
            break
        psutil.wait_procs(living, timeout=0.5)
    shutil.rmtree(os.path.dirname(file), ignore_errors=True)


def gather_processes(processes: list[list[typing.Any]], known: dict[tuple[int, float], typing.Any]) -> None:
    """Adds the living noted processes, and all their children, to `known`."""
    import psutil

    for pid, created, *_ in processes:
        try:
            process = psutil.Process(int(pid))
            if abs(process.create_time() - created) < TOLERANCE:
                for one in [process, *process.children(recursive=True)]:
                    known[(one.pid, one.create_time())] = one
        except psutil.Error:
            pass


def is_running(process: typing.Any) -> bool:
    """Whether a process runs and is no zombie."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
