"""Keeps each rank's rows in order: reads lost ones from its disk before later ones pass."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from workbench.cluster.transport.wire import Batch

Piece = tuple[int, dict[str, Any]]
Append = Callable[[str, int, int, dict[str, Any]], None]
HOLD = 3.0  # seconds that later rows wait for earlier ones to reach the disk,
UNHEARD = 30.0  # and if the rank's engine, on a busy machine, does not answer
TRIES = 3  # reads at the end of a run


class Gaps:
    """`next` is the number of the next row per (kind, rank); `missed(kind, rank, start)` reads from disk.

    Rows pass, in order, to `append(kind, rank, seq, columns)`, from one thread at a time.
    """

    def __init__(
        self, following: dict[tuple[str, int], int], missed: Callable[[str, int, int], list[Piece]], append: Append
    ) -> None:
        self.next: dict[tuple[str, int], int] = defaultdict(int, following)
        self._missed, self._append = missed, append
        self._lock = threading.Lock()
        self._due: dict[tuple[str, int], int] = {}  # rows at the last reminder
        self._held: dict[tuple[str, int], list[Piece]] = {}
        self._since: dict[tuple[str, int], float] = {}

    def put(self, batch: Batch) -> None:
        """Takes in `batch`. It passes, with the rows that waited for it, unless an earlier row is missing."""
        with self._lock:
            self._put((batch.kind, batch.rank), batch)

    def _put(self, key: tuple[str, int], batch: Batch) -> None:
        held = self._held.setdefault(key, [])
        held.append((batch.seq, batch.columns))
        if held[0][0] <= self.next[key]:
            return self._pass(key)
        began = self._since.setdefault(key, time.monotonic())
        found = self._from_disk(key)
        reached = max((seq + len(c["rank"]) for seq, c in found or ()), default=self.next[key])
        if reached >= held[0][0] or time.monotonic() - began > (UNHEARD if found is None else HOLD):
            held[:0] = found or []
            self._pass(key)

    def remind(self, kind: str, rank: int, sent: int) -> None:
        """Takes in that a rank has sent `sent` rows. Fetches those of the last reminder that have not come."""
        key = kind, rank
        due, self._due[key] = self._due.get(key, 0), sent
        with self._lock:
            if self.next[key] < due and (found := self._from_disk(key)) is not None:
                self._held[key] = found + self._held.get(key, [])
                self._pass(key)

    def mend(self, kind: str, rank: int, sent: int) -> None:
        """At the end, fetches what is missing of the first `sent` rows. Rows that waited pass even if it fails."""
        key = kind, rank
        with self._lock:
            found = None
            for _ in range(TRIES if self.next[key] < sent or self._held.get(key) else 0):
                if (found := self._from_disk(key)) is not None:
                    break
            self._held[key] = (found or []) + self._held.get(key, [])
            self._pass(key)

    def release(self, kind: str, rank: int) -> None:
        """Passes the rows that wait, because the missing ones cannot be read."""
        with self._lock:
            self._pass((kind, rank))

    def _from_disk(self, key: tuple[str, int]) -> list[Piece] | None:
        """Reads the rows from the next one on; None if the disk or the rank does not answer."""
        try:
            return self._missed(*key, self.next[key])
        except (OSError, RuntimeError):
            return None

    def _pass(self, key: tuple[str, int]) -> None:
        self._since.pop(key, None)
        for seq, columns in self._held.pop(key, []):
            self.next[key] = max(self.next[key], seq + len(columns["rank"]))
            self._append(*key, seq, columns)
