"""Writes one rank's rows to disk, on the only thread that a hanging disk stops. It loses rows, never the run."""

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

from workbench.record.folders import make_private_folder
from workbench.record.store import Writer
from workbench.record.timeline import KINDS

WRITE_INTERVAL = 0.66  # seconds between 2 writes
RETRY_INTERVAL = 5.0  # seconds until the next try after a failure
HUNG_SECONDS = 1.4  # seconds without an answer of the disk before a report
CLOSE_TIMEOUT = 2.5  # seconds that the end of a run waits for the disk; the engine may write the rest later
RECOVERED_TEXT = "the record is being written again"

Rows = tuple[int, dict[str, Any]]  # (number of the first row, columns)

_log = logging.getLogger(__name__)


class _SpoolFile(NamedTuple):
    """A file of this rank: path, (device, inode), writer, and [number of rows written]."""

    path: Path
    file: tuple[int, int]
    writer: Writer
    rows: list[int]


class RowSpool:
    """Appends one rank's rows to the run directory. `queue_rows` and `take_reports` never wait for the disk.

    Counts the rows that the run directory lacks, and reports each failure once. Rows that no file can hold are lost,
    together with all waiting rows of their kind. This is no failure of the disk.

    limit: rows of a kind that may wait for the disk; further rows are lost
    """

    def __init__(self, path: Path, rank: int, limit: int) -> None:
        self.path, self.rank, self.limit = path, rank, limit
        self.cpu_seconds = 0.0  # of the spool's thread
        self._waiting: dict[str, list[Rows]] = {kind: [] for kind in KINDS}
        self._flying = 0  # rows in the write under way
        self._unwritten = 0  # rows that no file ever got
        self._gone_rows = 0  # rows in files that the run directory has lost
        self._parts: dict[str, _SpoolFile] = {}  # the open file of each kind
        self._ended_files: list[_SpoolFile] = []
        self._next: dict[str, int] = {}  # of a part's next row
        self._home: tuple[int, int] | None = None  # (device, inode) of the run directory, after the first file
        self._failed_at: float | None = None
        self._write_began: float | None = None  # when the write under way began
        self._hung = False
        self._reports: list[dict[str, Any]] = []
        self._refused: set[str] = set()  # kinds with a reported row that no file can hold
        self._lock = threading.RLock()
        self._wake, self._idle = threading.Event(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run_writes, name=f"rank {rank} spool", daemon=True)
        self._thread.start()

    # -- the recorder's thread

    @property
    def lost_rows(self) -> int:
        """Rows that the run directory lacks, with waiting rows while the disk does not answer."""
        with self._lock:
            return self._unwritten + self._gone_rows + (self._count_waiting() if self._hung else 0)

    def queue_rows(self, kind: str, seq: int, columns: dict[str, Any]) -> None:
        """seq: the number of the first row"""
        with self._lock:
            if _count_rows(self._waiting[kind]) >= self.limit:
                self._unwritten += len(columns["rank"])
            else:
                self._waiting[kind].append((seq, columns))

    def take_reports(self) -> list[str]:
        since = self._write_began
        with self._lock:
            if since is not None and not self._hung and time.monotonic() - since > HUNG_SECONDS:
                self._hung = True
                self._add_report(self._make_failure("the disk does not answer", self._count_waiting()))
            said, self._reports = [json.dumps(d) for d in self._reports], []
        return said

    def settle_rows(self, timeout: float) -> bool:
        """Returns whether waiting rows were written within `timeout` seconds."""
        self._idle.clear()
        self._wake.set()
        return self._idle.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Returns whether waiting rows were written within `timeout` seconds. A disk that answers later still gets all
        rows.
        """
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _count_waiting(self) -> int:
        return self._flying + sum(_count_rows(waiting) for waiting in self._waiting.values())

    # -- the spool's own thread

    def _run_writes(self) -> None:
        while not self._closing:
            if self._wake.wait(WRITE_INTERVAL):
                self._wake.clear()
                self._write_once()
                self._idle.set()
            else:
                self._write_once()
        self._write_once()
        try:
            self._close_parts()
        except Exception:
            _log.exception("rank %d: the record was not closed", self.rank)
        self.cpu_seconds = time.thread_time()

    def _write_once(self) -> None:
        self._write_began = time.monotonic()
        try:
            self.write_rows()
        except Exception:
            _log.exception("rank %d: the record was not written; it is tried again", self.rank)
        finally:
            self._write_began = None
        with self._lock:
            answers, self._hung = self._hung, False
            if answers and self._failed_at is None:
                self._add_report(self._make_recovery())
        self.cpu_seconds = time.thread_time()

    def write_rows(self) -> None:
        """After a failure, rows are lost until a write succeeds."""
        gone = self._find_missing()
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_INTERVAL:
            return self._lose_waiting()
        try:
            if gone:
                raise OSError(errno.ENOENT, self._describe_missing(gone))
            for kind in KINDS:
                self._write_kind(kind)
        except OSError as error:
            return self._handle_failure(error)
        if self._failed_at is not None and self._parts:
            self._failed_at = None
            self._add_report(self._make_recovery())

    def _find_missing(self) -> list[Path]:
        """Returns the open files that are gone, and counts the rows of all files that are gone."""
        gone = [part for part in (*self._ended_files, *self._parts.values()) if not _is_same_file(part.path, part.file)]
        with self._lock:
            self._gone_rows = sum(part.rows[0] for part in gone)
        return [part.path for part in gone if part in self._parts.values()]

    def _describe_missing(self, gone: list[Path]) -> str:
        return f"{gone[0].name} is gone" if _is_same_file(self.path, self._home) else "the run directory is gone"

    def _write_kind(self, kind: str) -> None:
        with self._lock:
            waiting, self._waiting[kind] = self._waiting[kind], []
            self._flying = left = _count_rows(waiting)
        try:
            for first, columns in _join_batches(waiting):
                self._append_rows(kind, first, columns)
                left -= len(columns["rank"])
        except OSError:
            raise
        except Exception as error:
            self._refuse_rows(kind, error, left)
            left = 0
        finally:
            with self._lock:
                self._flying = 0
                self._unwritten += left

    def _append_rows(self, kind: str, first: int, columns: dict[str, Any]) -> None:
        self._write_began = time.monotonic()  # several slow writes do not count as hanging
        if kind in self._parts and self._next[kind] != first:  # rows were lost before these; a part has no gaps
            self._end_part(kind)
        if kind not in self._parts:
            self._open_part(kind, first)
        part = self._parts[kind]
        part.writer.append(columns)
        part.rows[0] += len(columns["rank"])
        self._next[kind] = first + len(columns["rank"])

    def _open_part(self, kind: str, first: int) -> None:
        if self._home is None:
            make_private_folder(self.path)
        elif not _is_same_file(self.path, self._home):  # another process may have made a new one
            raise OSError(errno.ENOENT, "the run directory is gone")
        writer = Writer(self.path, kind, self.rank, first)
        self._parts[kind] = _SpoolFile(writer.path, writer.identity, writer, [0])
        self._home = self._home or _identify_file(self.path)

    def _end_part(self, kind: str) -> None:
        """Deletes an empty part, because each try on a full disk would leave one."""
        part = self._parts.pop(kind)
        part.writer.abandon()
        if part.writer.nbytes:
            self._ended_files.append(part)
        elif _is_same_file(part.path, part.file):
            part.path.unlink(missing_ok=True)

    def _refuse_rows(self, kind: str, error: Exception, rows: int) -> None:
        """Ends the part, because its writer may have kept some of the rows."""
        with self._lock:
            self._unwritten += rows
        if kind in self._parts:
            self._end_part(kind)
        if kind not in self._refused:
            self._refused.add(kind)
            text = f"rank {self.rank}: there are {kind} that no file can hold ({error})"
            self._add_report({"error": "", "lost": self.lost_rows, "text": text})

    def _handle_failure(self, error: OSError) -> None:
        """Ends all files, which stay readable. The next try begins new parts."""
        fresh = self._failed_at is None
        self._failed_at = time.monotonic()
        for kind in list(self._parts):
            self._end_part(kind)
        self._find_missing()
        self._lose_waiting()
        if fresh:
            self._add_report(self._make_failure(error.strerror or str(error), 0))

    def _add_report(self, what: dict[str, Any]) -> None:
        with self._lock:
            self._reports.append(what)

    def _lose_waiting(self) -> None:
        with self._lock:
            for waiting in self._waiting.values():
                self._unwritten += _count_rows(waiting)
                waiting.clear()

    def _make_failure(self, what: str, behind: int) -> dict[str, Any]:
        lost = self._unwritten + self._gone_rows + behind
        return {"error": what, "lost": lost, "text": f"the record is not being written: {what}"}

    def _make_recovery(self) -> dict[str, Any]:
        lost = self._unwritten + self._gone_rows
        return {"error": "", "lost": lost, "text": f"{RECOVERED_TEXT}; {lost} rows are not on disk"}

    def _close_parts(self) -> None:
        for part in self._parts.values():
            try:
                part.writer.close()
            except Exception:  # it must not keep the other files open
                part.writer.abandon()


def _identify_file(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _is_same_file(path: Path, file: tuple[int, int] | None) -> bool:
    try:
        return _identify_file(path) == file
    except OSError:
        return False


def _join_batches(batches: list[Rows]) -> Iterator[Rows]:
    """A new batch begins after lost rows."""
    while batches:
        first, n = batches[0][0], 1
        end = first + len(batches[0][1]["rank"])
        while n < len(batches) and batches[n][0] == end:
            end += len(batches[n][1]["rank"])
            n += 1
        yield first, _join_columns([columns for _, columns in batches[:n]])
        batches = batches[n:]


def _count_rows(waiting: list[Rows]) -> int:
    return sum(len(columns["rank"]) for _, columns in waiting)


def _join_columns(batches: list[dict[str, Any]]) -> dict[str, Any]:
    if len(batches) == 1:
        return batches[0]
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
