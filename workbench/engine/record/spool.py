"""One rank's rows on disk, written on a thread of their own: a disk that hangs stops that thread and nothing else.

A disk that fails loses rows, never the run: what the run directory lacks is counted, and said once. It does not know
what the rows mean.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.record.store import Writer
from workbench.record.timeline import KINDS

EVERY = 0.66  # seconds between two writes
RETRY_EVERY = 5.0  # seconds until a disk that failed is tried again
HUNG = 1.4  # seconds that one write may last before it is said that the disk does not answer
PATIENCE = 2.5  # seconds that the end waits for the disk; what is not written then may still be, if the engine lives
AGAIN = "the record is being written again"

Rows = tuple[int, dict[str, Any]]  # (number of the first row, columns)

_log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A file that this rank began, by name and by what it is; `rows` that were written into it."""

    path: Path
    file: tuple[int, int]
    writer: Writer
    rows: list[int]


class Spool:
    """Appends one rank's rows to the run directory. `take` and `said` never wait for the disk.

    Rows that no file can hold are lost with those of their kind that waited beside them; that is no fault of the disk.
    limit: once so many rows of a kind wait for the disk, those that come are lost.
    """

    def __init__(self, path: Path, rank: int, limit: int) -> None:
        self.path, self.rank, self.limit = path, rank, limit
        self.cpu_seconds = 0.0  # of this spool's own thread
        self._waiting: dict[str, list[Rows]] = {kind: [] for kind in KINDS}
        self._flying = 0  # rows that are being written
        self._unwritten = 0  # rows that never came to a file
        self._gone = 0  # rows in files that are no longer in the run directory
        self._parts: dict[str, _Part] = {}  # that are written into
        self._ended: list[_Part] = []
        self._next: dict[str, int] = {}  # number of the row that comes next in a part
        self._home: tuple[int, int] | None = None  # what the run directory is, once a file was made there
        self._failed_at: float | None = None
        self._since: float | None = None  # when the write under way began
        self._hung = False
        self._untold: list[dict[str, Any]] = []
        self._refused: set[str] = set()  # kinds of which it was said that rows could not be written
        self._lock = threading.RLock()
        self._wake, self._idle = threading.Event(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"rank {rank} spool", daemon=True)
        self._thread.start()

    # -- the recorder's thread

    @property
    def lost(self) -> int:
        """Rows that the run directory lacks; while the disk does not answer, also those that wait for it."""
        with self._lock:
            return self._unwritten + self._gone + (self._behind() if self._hung else 0)

    def take(self, kind: str, seq: int, columns: dict[str, Any]) -> None:
        """Rows that are to be written."""
        with self._lock:
            if _count(self._waiting[kind]) >= self.limit:
                self._unwritten += len(columns["rank"])
            else:
                self._waiting[kind].append((seq, columns))

    def said(self) -> list[str]:
        """What has to be marked, as JSON; each is said once."""
        since = self._since
        with self._lock:
            if since is not None and not self._hung and time.monotonic() - since > HUNG:
                self._hung = True
                self._tell(self._failure("the disk does not answer", self._behind()))
            said, self._untold = [json.dumps(d) for d in self._untold], []
        return said

    def settle(self, timeout: float) -> bool:
        """Writes what waits; whether that was done within `timeout` seconds."""
        self._idle.clear()
        self._wake.set()
        return self._idle.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Writes what waits and ends; whether that was done. A disk that answers later gets all that was taken."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _behind(self) -> int:
        return self._flying + sum(_count(waiting) for waiting in self._waiting.values())

    # -- the spool's own thread

    def _serve(self) -> None:
        while not self._closing:
            if self._wake.wait(EVERY):
                self._wake.clear()
                self._turn()
                self._idle.set()
            else:
                self._turn()
        self._turn()
        try:
            self._give_up()
        except Exception:
            _log.exception("rank %d: the record was not closed", self.rank)
        self.cpu_seconds = time.thread_time()

    def _turn(self) -> None:
        self._since = time.monotonic()
        try:
            self.write()
        except Exception:
            _log.exception("rank %d: the record was not written; it is tried again", self.rank)
        finally:
            self._since = None
        with self._lock:
            answers, self._hung = self._hung, False
            if answers and self._failed_at is None:
                self._tell(self._again())
        self.cpu_seconds = time.thread_time()

    def write(self) -> None:
        """Writes what waits; after a failure what waits is lost until writing works again."""
        gone = self._missing()
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_EVERY:
            return self._lose()
        try:
            if gone:
                raise OSError(errno.ENOENT, self._what(gone))
            for kind in KINDS:
                self._put(kind)
        except OSError as error:
            return self._fail(error)
        if self._failed_at is not None and self._parts:
            self._failed_at = None
            self._tell(self._again())

    def _missing(self) -> list[Path]:
        """Which files that are written into are gone; and counts the rows of all that are."""
        gone = [part for part in (*self._ended, *self._parts.values()) if not _is(part.path, part.file)]
        with self._lock:
            self._gone = sum(part.rows[0] for part in gone)
        return [part.path for part in gone if part in self._parts.values()]

    def _what(self, gone: list[Path]) -> str:
        return f"{gone[0].name} is gone" if _is(self.path, self._home) else "the run directory is gone"

    def _put(self, kind: str) -> None:
        """Writes what waits of one kind. Raises OSError."""
        with self._lock:
            waiting, self._waiting[kind] = self._waiting[kind], []
            self._flying = left = _count(waiting)
        try:
            for first, columns in _stretches(waiting):
                self._append(kind, first, columns)
                left -= len(columns["rank"])
        except OSError:
            raise
        except Exception as error:
            self._refuse(kind, error, left)
            left = 0
        finally:
            with self._lock:
                self._flying = 0
                self._unwritten += left

    def _append(self, kind: str, first: int, columns: dict[str, Any]) -> None:
        self._since = time.monotonic()  # a turn of several slow writes is none that hangs
        if kind in self._parts and self._next[kind] != first:  # rows between were lost; a part has no holes
            self._end(kind)
        if kind not in self._parts:
            self._open(kind, first)
        part = self._parts[kind]
        part.writer.append(columns)
        part.rows[0] += len(columns["rank"])
        self._next[kind] = first + len(columns["rank"])

    def _open(self, kind: str, first: int) -> None:
        if self._home is None:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not _is(self.path, self._home):  # one that somebody else made there is not this run's
            raise OSError(errno.ENOENT, "the run directory is gone")
        writer = Writer(self.path, kind, self.rank, first)
        self._parts[kind] = _Part(writer.path, writer.identity, writer, [0])
        self._home = self._home or _file(self.path)

    def _end(self, kind: str) -> None:
        """Leaves a part as it is; an empty one is taken away, else each try on a full disk would leave one."""
        part = self._parts.pop(kind)
        part.writer.abandon()
        if part.writer.nbytes:
            self._ended.append(part)
        elif _is(part.path, part.file):
            part.path.unlink(missing_ok=True)

    def _refuse(self, kind: str, error: Exception, rows: int) -> None:
        """Loses what waited of a kind, for what is in it; its writer may have kept some of that, and is left."""
        with self._lock:
            self._unwritten += rows
        if kind in self._parts:
            self._end(kind)
        if kind not in self._refused:
            self._refused.add(kind)
            text = f"rank {self.rank}: there are {kind} that no file can hold ({error})"
            self._tell({"error": "", "lost": self.lost, "text": text})

    def _fail(self, error: OSError) -> None:
        """Gives up all files: their streams end here, readable; the next try begins new parts."""
        fresh = self._failed_at is None
        self._failed_at = time.monotonic()
        for kind in list(self._parts):
            self._end(kind)
        self._missing()
        self._lose()
        if fresh:
            self._tell(self._failure(error.strerror or str(error), 0))

    def _tell(self, what: dict[str, Any]) -> None:
        with self._lock:
            self._untold.append(what)

    def _lose(self) -> None:
        with self._lock:
            for waiting in self._waiting.values():
                self._unwritten += _count(waiting)
                waiting.clear()

    def _failure(self, what: str, behind: int) -> dict[str, Any]:
        lost = self._unwritten + self._gone + behind
        return {"error": what, "lost": lost, "text": f"the record is not being written: {what}"}

    def _again(self) -> dict[str, Any]:
        lost = self._unwritten + self._gone
        return {"error": "", "lost": lost, "text": f"{AGAIN}; {lost} rows are not on disk"}

    def _give_up(self) -> None:
        for part in self._parts.values():
            try:
                part.writer.close()
            except Exception:  # one that does not end well keeps no other open
                part.writer.abandon()


def _file(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _is(path: Path, file: tuple[int, int] | None) -> bool:
    """Whether there is still the same file, or directory, at `path`."""
    try:
        return _file(path) == file
    except OSError:
        return False


def _stretches(batches: list[Rows]) -> Iterator[Rows]:
    """Batches that follow each other as one; another one begins where rows between were lost."""
    while batches:
        first, n = batches[0][0], 1
        end = first + len(batches[0][1]["rank"])
        while n < len(batches) and batches[n][0] == end:
            end += len(batches[n][1]["rank"])
            n += 1
        yield first, _joined([columns for _, columns in batches[:n]])
        batches = batches[n:]


def _count(waiting: list[Rows]) -> int:
    return sum(len(columns["rank"]) for _, columns in waiting)


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    if len(batches) == 1:
        return batches[0]
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
