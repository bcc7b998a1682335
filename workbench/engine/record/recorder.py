"""The recorder: takes what a rank writes down, pushes it on a thread of its own, and hands it to the spool.

Writing down is one append to a list, from any thread; it never blocks and never reads a clock (the times come
with the rows). Bounded: what does not fit is dropped and counted. A disk that fails or hangs loses rows, which is said
in the record; neither training nor who watches it waits for it. It does not know what the rows mean.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.engine.record.spool import PATIENCE, Spool
from workbench.record.timeline import KINDS, Table

Stretch = tuple[str, int, dict[str, Any]]  # (kind, number of the first row, columns)
Push = Callable[[list[Stretch]], None]
PUSH_EVERY = 0.33  # seconds: each wake-up costs more than the rows it takes along
SETTLED = 1.0  # seconds that who asks for what was pushed to be on disk waits

_log = logging.getLogger(__name__)


class Recorder:
    """Records spans, samples and marks of one rank.

    run_dir: where to spool (None: nowhere). push: called three times a second from this recorder's thread with
    all that is new, as (kind, number of the first row among this rank's rows of that kind, columns).
    limit: rows that may wait for the thread; what exceeds it is dropped and counted in Samples "dropped".
    """

    def __init__(self, rank: int, run_dir: Path | None = None, push: Push | None = None, limit: int = 200_000) -> None:
        self.rank, self.limit = rank, limit
        self.dropped = 0  # rows that did not fit
        self._cpu_seconds = 0.0
        self._pending: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in KINDS}
        self._spans, self._samples, self._marks = self._pending.values()
        self._push = push
        self._new: list[Stretch] = []  # to be pushed
        self._spool = Spool(Path(run_dir), rank, limit) if run_dir is not None else None
        self._types = {kind: Table(kind).types for kind in KINDS}
        self._sent = dict.fromkeys(KINDS, 0)
        self._told = 0
        self._complained = False
        self._now = (0, 0.0)  # step and time of the newest row seen
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"rank {rank} recorder", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Rows that the run directory lacks."""
        return self._spool.lost if self._spool else 0

    @property
    def cpu_seconds(self) -> float:
        """That recording has taken, of both threads."""
        return self._cpu_seconds + (self._spool.cpu_seconds if self._spool else 0.0)

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

    def settle(self) -> bool:
        """Writes what was pushed so far; whether it is on disk, for which `SETTLED` seconds are waited at most."""
        return self._spool is None or self._spool.settle(SETTLED)

    def close(self) -> None:
        """Flushes everything and ends the thread; a disk that does not answer is waited for `PATIENCE` seconds."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the recorder's own thread

    def _serve(self) -> None:
        while not self._closing.wait(PUSH_EVERY):
            self._flush()
        self._take()
        if self._spool:
            self._try(self._settle, self._spool)
        self._send()
        self._cpu_seconds = time.thread_time()

    def _flush(self) -> None:
        self._take()
        self._send()
        self._cpu_seconds = time.thread_time()

    def _take(self) -> None:
        for kind in KINDS:
            self._try(self._carry, kind)
        self._try(self._tell)
        if self._spool:
            self._try(self._hear, self._spool)

    def _settle(self, spool: Spool) -> None:
        """Waits for the last rows to be on disk, and has what was to be said of that pushed, too."""
        until = time.monotonic() + PATIENCE
        spool.settle(PATIENCE)
        self._try(self._hear, spool)
        spool.close(max(until - time.monotonic(), 0.0))
        self._hear(spool)

    def _try(self, part: Callable[..., None], *rest: Any) -> None:
        """Does one part of a flush; whatever goes wrong there, the others are done, and what comes after the last."""
        try:
            part(*rest)
        except Exception:
            _log.exception("rank %d: a flush of the record failed in part; the rest is done all the same", self.rank)

    def _hear(self, spool: Spool) -> None:
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
