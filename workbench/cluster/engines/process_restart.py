"""Restarts an engine's process, and notes its kinds of run.

A custom loop (a script or a function) leaves default types, seeds, modules and threads behind. So it gets a fresh
process that no later run uses. engine_renewal.py is the lab's side.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import psutil

RESTART_DELAY = 0.2  # seconds for an engine to send its last answer before it restarts
KILL_TIMEOUT = 2.0  # seconds for a killed child to be gone

_first_environment, _first_folder = dict(os.environ), os.getcwd()  # as before the first run
_run_kinds: set[str] = set()  # "task", "loop"


def refuse_second_loop() -> None:
    """Raises RuntimeError if this process has run a custom loop."""
    if "loop" in _run_kinds:
        raise RuntimeError("another training loop has run in this engine's process, and its state would change this "
        "run; close the lab and create it again")  # fmt: skip


def note_run(leads: bool) -> None:
    """leads: whether a custom loop makes the steps"""
    _run_kinds.add("loop" if leads else "task")


def list_run_kinds() -> list[str]:
    """Returns this process's kinds of run ("task", "loop")."""
    return sorted(_run_kinds)


def refuse_restart() -> None:
    """Raises RuntimeError if this process cannot restart."""
    if "mpi4py.MPI" in sys.modules:
        raise RuntimeError("this engine has MPI open, which one process can open only once; start engines without MPI")


def restart_soon() -> None:
    """Soon becomes a new engine of the same command line, environment and pid, so Slurm or SSH sees no end."""
    threading.Timer(RESTART_DELAY, _execute_again).start()


def _execute_again() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.Error):  # it may have ended
            child.kill()
    psutil.wait_procs(children, timeout=KILL_TIMEOUT)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        _restore_stream(number, stream)
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        if (number := int(name)) > 2:
            try:
                os.set_inheritable(number, False)
            except OSError:  # open only for this listing
                continue
    os.chdir(_first_folder)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _first_environment)  # noqa: S606 (its own command line)


def _restore_stream(number: int, stream: Any) -> None:
    """Undoes ipykernel's redirection of a stream, because its reader ends."""
    copy = getattr(stream, "_original_stdstream_copy", None)
    if copy is not None:
        os.dup2(copy, number)
