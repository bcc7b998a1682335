"""Keeps each rank's rows in order: lost rows come from its disk before later ones pass."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from workbench.cluster.transport.row_encoding import RowBatch

Piece = tuple[int, dict[str, Any]]
Append = Callable[[str, int, int, dict[str, Any]], None]
DISK_WAIT = 3.0  # seconds for earlier rows to reach the disk,
SILENT_ENGINE_WAIT = 30.0  # and if the rank's engine, on a busy machine, does not answer
MAX_READS = 3  # at a run's end


class ReorderBuffer:
    """`next` is the number of the next row per (kind, rank); `missed(kind, rank, start)` reads from disk.

    Rows pass, in order, to `append(kind, rank, seq, columns)`, from one thread at a time.
    """

    def __init__(
        self, following: dict[tuple[str, int], int], missed: Callable[[str, int, int], list[Piece]], append: Append
    ) -> None:
        self.next_seq: dict[tuple[str, int], int] = defaultdict(int, following)
        self._read_missing, self._append = missed, append
        self._lock = threading.Lock()
        self._sent_counts: dict[tuple[str, int], int] = {}
        self._waiting_pieces: dict[tuple[str, int], list[Piece]] = {}
        self._gap_began: dict[tuple[str, int], float] = {}

    def put_batch(self, batch: RowBatch) -> None:
        """Rows after a gap wait until the disk fills it."""
        key = batch.kind, batch.rank
        with self._lock:
            self._keep_waiting(key, [(batch.seq, batch.columns)])
            if self._pass_rows(key):
                return
            began = self._gap_began.setdefault(key, time.monotonic())
            found = self._read_from_disk(key)
            self._keep_waiting(key, found or [])
            if not self._pass_rows(key) and time.monotonic() - began > (
                SILENT_ENGINE_WAIT if found is None else DISK_WAIT
            ):
                self._pass_rows(key, lossy=True)

    def take_count(self, kind: str, rank: int, sent: int) -> None:
        """sent: the rank's count. Fetches missing rows of its last count."""
        key = kind, rank
        due, self._sent_counts[key] = self._sent_counts.get(key, 0), sent
        with self._lock:
            if self.next_seq[key] < due and (found := self._read_from_disk(key)) is not None:
                self._keep_waiting(key, found)
                self._pass_rows(key)

    def fetch_missing(self, kind: str, rank: int, sent: int) -> None:
        """At the end, fetches missing rows of the first `sent`. Waiting rows then pass anyway."""
        key = kind, rank
        with self._lock:
            for _ in range(MAX_READS if self.next_seq[key] < sent or self._waiting_pieces.get(key) else 0):
                if (found := self._read_from_disk(key)) is not None:
                    self._keep_waiting(key, found)
                    break
            self._pass_rows(key, lossy=True)

    def release_rows(self, kind: str, rank: int) -> None:
        """Passes waiting rows, because the missing ones are unreadable."""
        with self._lock:
            self._pass_rows((kind, rank), lossy=True)

    def _read_from_disk(self, key: tuple[str, int]) -> list[Piece] | None:
        """Reads from the next row on; None without an answer."""
        try:
            return self._read_missing(*key, self.next_seq[key])
        except (OSError, RuntimeError):
            return None

    def _keep_waiting(self, key: tuple[str, int], new: list[Piece]) -> None:
        self._waiting_pieces[key] = sorted((*self._waiting_pieces.get(key, ()), *new), key=lambda piece: piece[0])

    def _pass_rows(self, key: tuple[str, int], lossy: bool = False) -> bool:
        """Passes waiting rows up to the first gap, or all if `lossy`. Returns whether none is left."""
        held = self._waiting_pieces.pop(key, [])
        while held and (lossy or held[0][0] <= self.next_seq[key]):
            self._gap_began.pop(key, None)
            seq, columns = held.pop(0)
            self.next_seq[key] = max(self.next_seq[key], seq + len(columns["rank"]))
            self._append(*key, seq, columns)
        if held:
            self._waiting_pieces[key] = held
        return not held
