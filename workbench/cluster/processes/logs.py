"""How the processes of a lab ended, in words, and what they wrote last."""

from __future__ import annotations

import signal
from pathlib import Path

from workbench.cluster.processes.place import Place


def log_file(place: Place, what: str) -> Path:
    """Where a process of the lab writes what it prints."""
    return place.path / "log" / f"{what.replace(' ', '-')}.log"


def log_tail(place: Place, what: str, lines: int = 12) -> str:
    """The last lines of a process's log, as the end of an error message; empty if there are none."""
    of = log_file(place, what)
    if what.startswith("engine ") and not of.exists():  # it is still to be forked
        of = log_file(place, "engines")
    try:
        text = of.read_text(errors="replace")
    except OSError:
        return ""
    tail = text.strip().splitlines()[-lines:]
    return "\nIts log ends:\n    " + "\n    ".join(tail) if tail else " Its log is empty."


def code_in_words(code: int | None) -> str:
    """How a child ended: `signal SIGKILL`, `exit code 1`."""
    if code is None:
        return "an exit code that nobody knows"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
