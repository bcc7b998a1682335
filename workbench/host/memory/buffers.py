"""What travels and is nobody's for good: bytes that a rank holds for children and messages, while they are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.host.core.changing import Changing
from workbench.rank import Bucket, Op

_MADE: dict[str, Callable[[int, int], int]] = {  # bytes that a collective makes, of those given and the ranks
    "all_gather": lambda nbytes, size: size * nbytes,
    "all_to_all": lambda nbytes, size: nbytes,
    "reduce_scatter": lambda nbytes, size: nbytes + nbytes // size,  # all pieces of a shard, and their sum
}


class Buffers:
    """What children of a rank hold that is nobody's for good: what they send if it was made for that, and what comes.

    Counted by what their collectives need, from the asking to the end of the child; a message from its sending to the
    end of the step. Lanes call from threads of their own.
    """

    def __init__(self, run: Changing) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._held: dict[Any, int] = {}
        self.known: dict[int, Callable[[], Any]] = {}  # storages that are counted elsewhere, weakly
        self.rooms: dict[int, Any] = {}  # tensors of buckets that are the same in every step, weakly, by their ids
        self.buckets: list[Bucket] = []  # where gradients lie, some of them elsewhere in every backward
        self.now = self.most = 0
        self.stepping = False
        self.measured = False  # does what is merely measured count, too, as shards that an evaluation gathers?

    def take(self, who: Any, op: Op) -> None:
        """`who`, a child, asks for a collective."""
        if op.measures and not self.measured:
            return
        room = self.rooms.get(id(op.args[0]))  # an id is soon another tensor's, once a room is given back
        if room is not None and room() is op.args[0] and op.verb == "all_reduce":  # nearly always
            return
        if nbytes := self._needs(op):
            self._hold(who, nbytes)

    def _hold(self, who: Any, nbytes: int) -> None:
        with self._lock:
            self._held[who] = self._held.get(who, 0) + nbytes
            self.now += nbytes
            self.most = max(self.most, self.now)

    def give(self, who: Any, value: Any = None) -> None:
        """`who` is over; what it returned is kept until that is taken, by `give` once more."""
        if self._held and who in self._held:
            kept = value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0
            with self._lock:
                self.now -= self._held.pop(who) - kept
                if kept:
                    self._held[who] = kept

    def post(self, x: Tensor) -> None:
        """A message is a copy. Those that a server posts belong to no step of its own and are not counted."""
        if self.stepping:
            self._hold("messages", x.numel() * x.element_size())

    def turn(self, stepping: bool) -> int:
        """The most since this was last called; does a step begin here, or has it ended?"""
        self.give("messages")
        self.stepping = stepping
        with self._lock:
            most, self.most = self.most, self.now
        return most

    def _needs(self, op: Op) -> int:
        """Bytes of what `op` is given, unless they are counted elsewhere, and of what it makes."""
        x, rank, group = op.args[0], self._run.rank, op.group
        me, size = (rank.id, rank.size) if group is None else (group.index(rank.id), len(group))
        if op.verb == "all_to_allv":  # rows become one vector, and another comes
            width = x[0].element_size()
            rows = sum(row.numel() for row in x)
            return int(width * (rows + rows + sum(row[me] for row in op.args[1])))
        nbytes = x.numel() * x.element_size()
        made = _MADE[op.verb](nbytes, size) if op.verb in _MADE else 0
        return made + (0 if self._owned(x) else nbytes)

    def _owned(self, x: Tensor) -> bool:
        where = x.untyped_storage()._cdata
        if where in self.known and self.known[where]() is not None:  # else another storage took its place
            return True
        if where in self._run.layout.lying:
            return True
        for bucket in self.buckets:
            if bucket.data is x:
                return True
        return any(bucket.data.untyped_storage()._cdata == where for bucket in self.buckets)
