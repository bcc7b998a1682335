"""The recorder: takes what a rank writes down, and spools and pushes it on a thread of its own.

Writing down is one append to a list, from any thread; it never blocks and never reads a clock (the times come
with the rows). Bounded: what does not fit is dropped and counted. A disk that fails loses rows, which is said
in the record; training never hears of it. It does not know what the rows mean.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.record.store import Writer
from workbench.record.timeline import KINDS, Table

Stretch = tuple[str, int, dict[str, Any]]  # (kind, number of the first row, columns)
Push = Callable[[list[Stretch]], None]
PUSH_EVERY = 0.25  # seconds: each wake-up costs more than the rows it takes along
SPOOL_EVERY = 3  # pushes: somewhat more often than once a second
RETRY_EVERY = 5.0  # seconds until a disk that failed is tried again

_log = logging.getLogger(__name__)


class Recorder:
    """Records spans, samples and marks of one rank.

    run_dir: where to spool (None: nowhere). push: called 4 times a second from this recorder's thread with
    all that is new, as (kind, number of the first row among this rank's rows of that kind, columns).
    limit: rows that may wait for the thread; what exceeds it is dropped and counted in Samples "dropped".
    """

    def __init__(self, rank: int, run_dir: Path | None = None, push: Push | None = None, limit: int = 200_000) -> None:
        self.rank, self.limit = rank, limit
        self.dropped = 0  # rows that did not fit
        self.lost = 0  # rows that could not be written to disk
        self.cpu_seconds = 0.0  # of the recorder's own thread
        self._pending: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in KINDS}
        self._spans, self._samples, self._marks = self._pending.values()
        self._push = push
        self._new: list[Stretch] = []  # to be pushed
        self._spool = _Spool(Path(run_dir), rank) if run_dir is not None else None
        self._types = {kind: Table(kind).types for kind in KINDS}
        self._sent = dict.fromkeys(KINDS, 0)
        self._told = 0
        self._complained = False
        self._now = (0, 0.0)  # step and time of the newest row seen
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"rank {rank} recorder", daemon=True)
        self._thread.start()

    # -- called from any thread, as often as something happens

    def span(self, step: int, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int) -> None:
        if len(self._spans) < self.limit:
            self._spans.append((step, lane, name, asked, t0, t1, nbytes))
        else:
            self.dropped += 1

    def sample(self, step: int, name: str, t: float, value: float) -> None:
        if len(self._samples) < self.limit:
            self._samples.append((step, name, t, value))
        else:
            self.dropped += 1

    def mark(self, step: int, name: str, t: float, detail: str) -> None:
        if len(self._marks) < self.limit:
            self._marks.append((step, name, t, detail))
        else:
            self.dropped += 1

    def close(self) -> None:
        """Flushes everything and ends the thread. Closing again does nothing."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the recorder's own thread

    def _serve(self) -> None:
        turn = 0
        while not self._closing.wait(PUSH_EVERY):
            turn += 1
            self._flush(spool=turn % SPOOL_EVERY == 0)
        self._flush(spool=True)
        if self._spool:
            self._try(self._spool.close)
            self._flush(spool=False)  # what closing had to say
        self.cpu_seconds = time.thread_time()

    def _flush(self, spool: bool) -> None:
        for kind in KINDS:
            self._try(self._carry, kind)
        self._try(self._tell)
        if spool and self._spool:
            self._try(self._write, self._spool)
        self._send()
        self.lost = self._spool.lost if self._spool else 0
        self.cpu_seconds = time.thread_time()

    def _try(self, part: Callable[..., None], *rest: Any) -> None:
        """Does one part of a flush; whatever goes wrong there, the others are done, and what comes after the last."""
        try:
            part(*rest)
        except Exception:
            _log.exception("rank %d: a flush of the record failed in part; the rest is done all the same", self.rank)

    def _write(self, spool: _Spool) -> None:
        spool.write()
        for detail in spool.said():
            self.mark(*self._now_as(), detail)
            self._carry("marks")

    def _now_as(self) -> tuple[int, str, float]:
        return self._now[0], "spool", self._now[1]

    def _carry(self, kind: str) -> None:
        """Takes the pending rows of a kind, as columns, to the spool and to what is pushed next."""
        pending = self._pending[kind]
        n = len(pending)
        if not n:
            return
        rows = pending[:n]
        del pending[:n]
        try:
            columns = self._columns(kind, rows)
        except Exception:
            self.dropped += n
            raise
        seq, self._sent[kind] = self._sent[kind], self._sent[kind] + n
        self._now = int(columns["step"][-1]), float(columns["t1" if kind == "spans" else "t"][-1])
        if self._spool:
            self._spool.take(kind, seq, columns)
        self._new.append((kind, seq, columns))

    def _send(self) -> None:
        new, self._new = self._new, []
        if not new or not self._push:
            return
        try:
            self._push(new)
        except Exception:
            if not self._complained:
                rows = ", ".join(f"{kind} from {seq} on" for kind, seq, _ in new)
                _log.exception("rank %d: rows were not taken (%s); said once", self.rank, rows)
            self._complained = True

    def _columns(self, kind: str, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
        types = self._types[kind]
        columns: dict[str, Any] = {"rank": np.full(len(rows), self.rank, types["rank"])}
        for name, values in zip(list(types)[1:], zip(*rows, strict=True), strict=True):
            columns[name] = np.array(values, types[name])
        return columns

    def _tell(self) -> None:
        """Writes down how many rows were dropped so far, when that has changed."""
        if self.dropped != self._told:
            self._told = self.dropped
            step, t = self._now
            self._samples.append((step, "dropped", t, float(self.dropped)))
            self._carry("samples")


class _Spool:
    """Appends one rank's rows to the run directory; survives a disk that fails, and says what was lost.

    Rows that no file can hold are lost with those of their kind that waited beside them; that is no fault of the disk.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.lost = 0
        self._waiting: dict[str, list[tuple[int, dict[str, Any]]]] = {kind: [] for kind in KINDS}
        self._writers: dict[str, Writer] = {}
        self._failed_at: float | None = None
        self._untold: list[dict[str, Any]] = []
        self._refused: set[str] = set()  # kinds of which it was said that rows could not be written

    def take(self, kind: str, seq: int, columns: dict[str, Any]) -> None:
        self._waiting[kind].append((seq, columns))

    def write(self) -> None:
        """Writes what waits; after a failure what waits is lost until writing works again."""
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_EVERY:
            return self._lose()
        for kind in KINDS:
            try:
                self._put(kind)
            except OSError as error:
                return self._fail(error)
        if self._failed_at is not None:
            self._failed_at = None
            text = f"recording again; {self.lost} rows were lost"
            self._untold.append({"error": "", "lost": self.lost, "text": text})

    def said(self) -> list[str]:
        """What has to be marked, as JSON; each is said once."""
        said, self._untold = [json.dumps(d) for d in self._untold], []
        return said

    def close(self) -> None:
        for kind in KINDS:  # marks about the last write itself
            try:
                if self._failed_at is None:
                    self._put(kind)
            except OSError as error:
                self._fail(error)
        for writer in self._writers.values():
            try:
                writer.close()
            except Exception:  # one that does not end well keeps no other open
                writer.abandon()

    def _put(self, kind: str) -> None:
        """Writes what waits of one kind. Raises OSError."""
        if not (waiting := self._waiting[kind]):
            return
        try:
            self._append(kind, waiting[0][0], _joined([columns for _, columns in waiting]))
        except OSError:
            raise
        except Exception as error:
            self._refuse(kind, error)
        waiting.clear()

    def _refuse(self, kind: str, error: Exception) -> None:
        """Loses what waits of a kind, for what is in it; its writer may have kept some of that, and is left."""
        self.lost += _count(self._waiting[kind])
        if writer := self._writers.pop(kind, None):
            writer.abandon()
            if not writer.nbytes:  # else each refusal would leave an empty file
                writer.path.unlink(missing_ok=True)
        if kind not in self._refused:
            self._refused.add(kind)
            text = f"rank {self.rank}: {self.lost} rows were lost: there are {kind} that no file can hold ({error})"
            self._untold.append({"error": "", "lost": self.lost, "text": text})

    def _append(self, kind: str, first: int, columns: dict[str, Any]) -> None:
        if kind not in self._writers:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writers[kind] = Writer(self.path, kind, self.rank, first)
        self._writers[kind].append(columns)

    def _fail(self, error: OSError) -> None:
        """Gives up all files: their streams end here, readable; the next try begins new parts."""
        fresh = self._failed_at is None
        self._failed_at = time.monotonic()
        for writer in self._writers.values():
            writer.abandon()
        self._writers = {}
        self._lose()
        if fresh:
            text = f"the record is not being written: {error.strerror or error}"
            self._untold.append({"error": error.strerror or str(error), "lost": self.lost, "text": text})

    def _lose(self) -> None:
        for waiting in self._waiting.values():
            self.lost += _count(waiting)
            waiting.clear()


def _count(waiting: list[tuple[int, dict[str, Any]]]) -> int:
    return sum(len(columns["rank"]) for _, columns in waiting)


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    if len(batches) == 1:
        return batches[0]
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
