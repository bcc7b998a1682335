"""Asks a disk about a run directory and its missing rows. A hanging disk delays callers only briefly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from workbench.record import store
from workbench.record.timeline import KINDS, Timeline

T = TypeVar("T")
DISK_TIMEOUT = 2.0  # seconds
EXISTS_TIMEOUT = 0.05  # seconds


def run_with_timeout(seconds: float, do: Callable[[], T]) -> T:
    """Returns or raises what `do()` does.

    Raises TimeoutError, an OSError, if it takes longer; `do` then continues unobserved.
    """
    out: list[Any] = []

    def doing() -> None:
        try:
            out.append((do(), None))
        except BaseException as error:
            out.append((None, error))

    thread = threading.Thread(target=doing, name="disk", daemon=True)
    thread.start()
    thread.join(seconds)
    if not out:
        raise TimeoutError(f"the disk did not answer within {seconds:g} s")
    value, error = out[0]
    if error is not None:
        raise error
    return value


class RunFolder:
    """A thread asks the disk whether a run is still at `path`."""

    def __init__(self, path: Path | str | None) -> None:
        self.path = Path(path) if path is not None else None
        self.is_there = False
        self._asking: threading.Thread | None = None
        self.was_there()

    def was_there(self) -> bool:
        """Returns the disk's last answer."""
        if self.path is None:
            return False
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask_disk, name="run directory", daemon=True)
            self._asking.start()
        self._asking.join(EXISTS_TIMEOUT)
        return self.is_there

    def _ask_disk(self) -> None:
        assert self.path
        self.is_there = _has_run(self.path)


def _has_run(path: Path) -> bool:
    try:
        return (path / "run.json").exists()
    except OSError:
        return False


def count_missing_rows(path: Path, timeline: Timeline) -> int:
    """Returns how many rows the run directory lacks; all, if it is gone."""
    try:
        held = store.counts(path)
    except FileNotFoundError:
        held = {}
    lacks = 0
    for kind in KINDS:
        found = np.unique(timeline.table(kind).rows().rank, return_counts=True)
        for rank, rows in zip(*(column.tolist() for column in found), strict=True):
            lacks += max(rows - held.get((kind, rank), 0), 0)
    return lacks
