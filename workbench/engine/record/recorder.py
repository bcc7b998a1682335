"""Takes a rank's rows, pushes them from a thread of its own, and passes them to the spool.

Recording a row is one append to a list, from any thread. It never blocks and reads no clock: rows bring their times.
Neither training nor the kernel waits for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.engine.record.row_spool import CLOSE_TIMEOUT, RowSpool
from workbench.record.timeline import KINDS, Table

KindRows = tuple[str, int, dict[str, Any]]  # (kind, number of the first row, columns)
Push = Callable[[list[KindRows]], None]
PUSH_INTERVAL = 0.33  # seconds: a wake-up costs more than the rows that it handles
SETTLE_TIMEOUT = 1.0  # seconds at most for the disk

_log = logging.getLogger(__name__)


class Recorder:
    """Records one rank's spans, samples and marks.

    run_dir: where to spool; None: nowhere
    push:    gets new rows 3 times a second from this recorder's thread, as (kind, number of the first row among this
             rank's rows of that kind, columns)
    limit:   rows that may wait for the thread. Further rows are dropped, and Samples "dropped" count them.
    """

    def __init__(self, rank: int, run_dir: Path | None = None, push: Push | None = None, limit: int = 200_000) -> None:
        self.rank, self.limit = rank, limit
        self.dropped = 0
        self._cpu_seconds = 0.0
        self._pending: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in KINDS}
        self._spans, self._samples, self._marks = self._pending.values()
        self._push = push
        self._new: list[KindRows] = []
        self._spool = RowSpool(Path(run_dir), rank, limit) if run_dir is not None else None
        self._types = {kind: Table(kind).types for kind in KINDS}
        self._sent = dict.fromkeys(KINDS, 0)
        self._reported_dropped = 0
        self._complained = False
        self._now = (0, 0.0)  # step and time of the newest row
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run_pushes, name=f"rank {rank} recorder", daemon=True)
        self._thread.start()

    @property
    def lost_rows(self) -> int:
        return self._spool.lost_rows if self._spool else 0

    @property
    def cpu_seconds(self) -> float:
        return self._cpu_seconds + (self._spool.cpu_seconds if self._spool else 0.0)

    # -- called from any thread

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

    def settle_rows(self) -> bool:
        """Returns whether all pushed rows are on disk, after SETTLE_TIMEOUT seconds at most."""
        return self._spool is None or self._spool.settle_rows(SETTLE_TIMEOUT)

    def close(self) -> None:
        """Flushes all rows. Waits `CLOSE_TIMEOUT` seconds for a disk that does not answer."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the recorder's own thread

    def _run_pushes(self) -> None:
        while not self._closing.wait(PUSH_INTERVAL):
            self._flush_rows()
        self._take_rows()
        if self._spool:
            self._run_guarded(self._settle_spool, self._spool)
        self._push_rows()
        self._cpu_seconds = time.thread_time()

    def _flush_rows(self) -> None:
        self._take_rows()
        self._push_rows()
        self._cpu_seconds = time.thread_time()

    def _take_rows(self) -> None:
        for kind in KINDS:
            self._run_guarded(self._carry_rows, kind)
        self._run_guarded(self._record_dropped)
        if self._spool:
            self._run_guarded(self._record_reports, self._spool)

    def _settle_spool(self, spool: RowSpool) -> None:
        until = time.monotonic() + CLOSE_TIMEOUT
        spool.settle_rows(CLOSE_TIMEOUT)
        self._run_guarded(self._record_reports, spool)
        spool.close(max(until - time.monotonic(), 0.0))
        self._record_reports(spool)

    def _run_guarded(self, part: Callable[..., None], *rest: Any) -> None:
        """Logs an error, so that the other parts of a flush still run."""
        try:
            part(*rest)
        except Exception:
            _log.exception("rank %d: a flush of the record failed in part; the rest is done all the same", self.rank)

    def _record_reports(self, spool: RowSpool) -> None:
        for detail in spool.take_reports():
            self.mark(*self._mark_fields(), detail)
            self._carry_rows("marks")

    def _mark_fields(self) -> tuple[int, str, float]:
        return self._now[0], "spool", self._now[1]

    def _carry_rows(self, kind: str) -> None:
        pending = self._pending[kind]
        n = len(pending)
        if not n:
            return
        rows = pending[:n]
        del pending[:n]
        try:
            columns = self._make_columns(kind, rows)
        except Exception:
            self.dropped += n
            raise
        seq, self._sent[kind] = self._sent[kind], self._sent[kind] + n
        self._now = int(columns["step"][-1]), float(columns["t1" if kind == "spans" else "t"][-1])
        if self._spool:
            self._spool.queue_rows(kind, seq, columns)
        self._new.append((kind, seq, columns))

    def _push_rows(self) -> None:
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

    def _make_columns(self, kind: str, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
        types = self._types[kind]
        columns: dict[str, Any] = {"rank": np.full(len(rows), self.rank, types["rank"])}
        for name, values in zip(list(types)[1:], zip(*rows, strict=True), strict=True):
            columns[name] = np.array(values, types[name])
        return columns

    def _record_dropped(self) -> None:
        if self.dropped != self._reported_dropped:
            self._reported_dropped = self.dropped
            step, t = self._now
            self._samples.append((step, "dropped", t, float(self.dropped)))
            self._carry_rows("samples")
