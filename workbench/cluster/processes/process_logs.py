"""Describes how a lab's processes ended, and quotes their logs."""

from __future__ import annotations

import signal
from pathlib import Path

from workbench.cluster.processes.lab_place import LabPlace


def make_log_path(place: LabPlace, what: str) -> Path:
    """Returns a process's log file."""
    return place.path / "log" / f"{what.replace(' ', '-')}.log"


def read_log_tail(place: LabPlace, what: str, lines: int = 12) -> str:
    """Returns the last lines of a process's log, to end an error message; empty without a log."""
    of = make_log_path(place, what)
    if what.startswith("engine ") and not of.exists():  # not forked yet
        of = make_log_path(place, "engines")
    try:
        text = of.read_text(errors="replace")
    except OSError:
        return ""
    tail = text.strip().splitlines()[-lines:]
    return "\nIts log ends:\n    " + "\n    ".join(tail) if tail else " Its log is empty."


def describe_exit_code(code: int | None) -> str:
    """Describes how a child ended: `signal SIGKILL`, `exit code 1`."""
    if code is None:
        return "an unknown exit code"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
