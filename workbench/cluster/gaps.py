"""Keeps each rank's rows in order: a message that was lost is made good from the rank's disk before later ones pass."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from workbench.cluster.wire import Batch

Piece = tuple[int, dict[str, Any]]
HOLD = 3.0  # seconds that later rows wait for earlier ones to reach the disk


class Gaps:
    """`next` is the number of the next row per (kind, rank); `missed(kind, rank, start)` reads from disk."""

    def __init__(self, following: dict[tuple[str, int], int], missed: Callable[[str, int, int], list[Piece]]) -> None:
        self.next: dict[tuple[str, int], int] = defaultdict(int, following)
        self._missed = missed
        self._held: dict[tuple[str, int], list[Piece]] = {}
        self._since: dict[tuple[str, int], float] = {}

    def put(self, batch: Batch) -> list[Piece]:
        """The pieces that may pass now that `batch` came: none while an earlier row is still missing."""
        key = batch.kind, batch.rank
        held = self._held.setdefault(key, [])
        held.append((batch.seq, batch.columns))
        if held[0][0] <= self.next[key]:
            return self._pass(key)
        began = self._since.setdefault(key, time.monotonic())
        found = self._from_disk(key)
        reached = max((seq + len(c["rank"]) for seq, c in found), default=self.next[key])
        if reached >= held[0][0] or time.monotonic() - began > HOLD:
            held[:0] = found
            return self._pass(key)
        return []

    def mend(self, kind: str, rank: int, sent: int) -> list[Piece]:
        """What is still missing of the first `sent` rows, which ought to have come by now, and what waited for it."""
        key = kind, rank
        found = self._from_disk(key) if self.next[key] < sent or self._held.get(key) else []
        self._held[key] = found + self._held.get(key, [])
        return self._pass(key)

    def _from_disk(self, key: tuple[str, int]) -> list[Piece]:
        try:
            return self._missed(*key, self.next[key])
        except (OSError, RuntimeError):
            return []

    def _pass(self, key: tuple[str, int]) -> list[Piece]:
        pieces = self._held.pop(key, [])
        self._since.pop(key, None)
        for seq, columns in pieces:
            self.next[key] = max(self.next[key], seq + len(columns["rank"]))
        return pieces
