"""Counts buffers in flight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor, UntypedStorage

from workbench.host.core.rank_view import RankView
from workbench.rank import Bucket, Op

_MADE: dict[str, Callable[[int, int], int]] = {  # bytes made of (bytes, ranks)
    "all_gather": lambda nbytes, size: size * nbytes,
    "all_to_all": lambda nbytes, size: nbytes,
    "reduce_scatter": lambda nbytes, size: nbytes + nbytes // size,  # pieces, and their sum
}


class BufferCounter:
    """Bytes that a rank's children hold only in flight.

    A collective counts from the request to the end of the child, a message from sending to the end of the step. Lanes
    call from their own threads.
    """

    def __init__(self, run: RankView) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._held: dict[Hashable, int] = {}
        self.known: dict[int, weakref.ref[UntypedStorage]] = {}  # of other categories
        self.rooms: dict[int, weakref.ref[Tensor]] = {}  # vectors that stay, by id
        self.buckets: list[Bucket] = []  # some move in backwards
        self.now = self.most = 0
        self.stepping = False
        self.measured = False  # counts measuring ops

    @contextmanager
    def count_measuring(self, measured: bool) -> Iterator[None]:
        """Inside, it counts ops that measure, if `measured`."""
        self.measured = measured
        try:
            yield
        finally:
            self.measured = False

    def note_standing(self, known: dict[int, weakref.ref[UntypedStorage]], buckets: list[Bucket],
                      rooms: dict[int, weakref.ref[Tensor]]) -> None:  # fmt: skip
        """Notes what other categories count, as in the attributes of these names."""
        self.known, self.buckets, self.rooms = known, buckets, rooms

    def note_request(self, who: Hashable, op: Op) -> None:
        if op.measures and not self.measured:
            return
        room = self.rooms.get(id(op.args[0]))  # ids are reused
        if room is not None and room() is op.args[0] and op.verb == "all_reduce":  # nearly always
            return
        if nbytes := self._count_needed(op):
            self._add_bytes(who, nbytes)

    def _add_bytes(self, who: Hashable, nbytes: int) -> None:
        with self._lock:
            self._held[who] = self._held.get(who, 0) + nbytes
            self.now += nbytes
            self.most = max(self.most, self.now)

    def note_end(self, who: Hashable, value: object = None) -> None:
        """Counts the result until a second call."""
        if self._held and who in self._held:
            kept = value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0
            with self._lock:
                self.now -= self._held.pop(who) - kept
                if kept:
                    self._held[who] = kept

    def note_message(self, x: Tensor) -> None:
        """A server's messages count only in its steps."""
        if self.stepping:
            self._add_bytes("messages", x.numel() * x.element_size())

    def take_peak(self, stepping: bool) -> int:
        """stepping: whether a step begins here, or has ended"""
        self.note_end("messages")
        self.stepping = stepping
        with self._lock:
            most, self.most = self.most, self.now
        return most

    def _count_needed(self, op: Op) -> int:
        """Counts results, and inputs that count nowhere else."""
        x, rank, group = op.args[0], self._run.rank, op.group
        me, size = (rank.id, rank.size) if group is None else (group.index(rank.id), len(group))
        if op.verb == "all_to_allv":  # one sent, one received
            width = x[0].element_size()
            rows = sum(row.numel() for row in x)
            return int(width * (rows + rows + sum(row[me] for row in op.args[1])))
        nbytes = x.numel() * x.element_size()
        made = _MADE[op.verb](nbytes, size) if op.verb in _MADE else 0
        return made + (0 if self._is_owned(x) else nbytes)

    def _is_owned(self, x: Tensor) -> bool:
        where = x.untyped_storage()._cdata
        if where in self.known and self.known[where]() is not None:  # the same storage
            return True
        if where in self._run.layout.lying:
            return True
        for bucket in self.buckets:
            if bucket.data is x:
                return True
        return any(bucket.data.untyped_storage()._cdata == where for bucket in self.buckets)
