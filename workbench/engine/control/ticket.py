"""Tickets: how all ranks learn of a change before the same step.

Rank 0 reads its inbox and publishes a ticket: a 32-byte header on a wire of its own, followed by JSON if there is
something to say. It is asked for just before the update and taken after it, so it hides behind the update and a
change acts on the very next step.

[Note: The flag] A meeting in every step, only to hear that there is nothing to say, holds up ranks that share cores.
On one host rank 0 raises a flag instead: before it begins the child with the number n, it writes n into memory that
all see. Who has completed child n must see it, for that needed rank 0. So all who have completed as many children
answer alike whether they are to meet, without a word. The last numbers stay to be seen: rank 0 may look, meet, be asked
for more and begin another child before the others have looked. It is never a step ahead, and raises it twice in one at
most.

Under a pipeline that never flushes the last stage ends a step long before the first one does, and would wait for it if
it heard of that step only then. So there a ticket is taken as many steps later as the stages lie apart.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.engine.wire.collectives import Wire
from workbench.engine.wire.lane import Lane
from workbench.engine.wire.mapped import mapped

Ticket = dict[str, Any]  # {"requests": [...]} and nothing else; an empty one is None
LAST = 8  # numbers that stay to be seen


class Flag:
    """The last numbers, in a small file that the ranks of one host share: rank 0 writes them and all read them."""

    def __init__(self, path: Path) -> None:
        self._map = mapped(path, 8 * LAST)
        self._numbers = np.frombuffer(self._map, dtype=np.int64)
        self._raised = 0  # how often it was

    def down(self) -> None:
        """Children are counted anew."""
        self._numbers[:] = 0

    def up(self, number: int) -> None:
        """In the place of the oldest number."""
        self._numbers[self._raised % LAST] = number
        self._raised += 1

    def after(self, number: int) -> int:
        """The first one that is larger than `number`; 0 if there is none."""
        return min((n for n in self._numbers.tolist() if n > number), default=0)

    def close(self) -> None:
        """Gives the file's descriptor back."""
        self._numbers = np.zeros(LAST, np.int64)
        self._map.close()


class Tickets:
    """The control wire of one rank, used by its training thread only. See [Note: The flag]."""

    def __init__(self, wire: Wire | None, rank: int, inbox: queue.SimpleQueue[Ticket], flag: Flag | None) -> None:
        self.wire, self.rank, self.inbox, self.flag = wire, rank, inbox, flag
        self._by_flag = False
        self._heard = 0  # the last number that was rung and answered
        self._raised = False
        self._under_way: deque[tuple[Any, torch.Tensor, bytes]] = deque()  # a Work, the header, what rank 0 has to say
        self.asked = False  # is one asked for that belongs to the present step?

    @property
    def waiting(self) -> int:
        """How many are asked for and not taken."""
        return len(self._under_way)

    def ring(self, number: int) -> None:
        """Rank 0 is about to begin the child with this number: it raises the flag if its inbox holds something."""
        if self._by_flag and self.flag is not None and not self._raised and not self.inbox.empty():
            self.flag.up(number)
            self._raised = True

    def raised(self, done: int) -> bool:
        """Is there to be a ticket, for those who have completed the child with the number `done`?"""
        if not self._by_flag:
            return True
        assert self.flag is not None
        number = self.flag.after(self._heard)
        if not 0 < number <= done:
            return False
        self._heard, self._raised = number, False
        return True

    def enter(self, strategy: Any, lane: Lane, flat: bool) -> None:
        """A strategy has taken over, and children are counted from 1 again. torch's own has none on our lane.

        flat: is no group of ranks without rank 0, who might complete a child that rank 0 has not begun?
        """
        size = self.wire.size if self.wire else 1
        alike = flat and strategy.lockstep and not strategy.opaque and not strategy.propagation(size)
        self._by_flag = self.flag is not None and alike
        self._heard, self._raised = 0, False
        lane.started = lane.completed = 0
        if self.flag is not None and self.rank == 0:
            self.flag.down()

    def close(self) -> None:
        if self.flag is not None:
            self.flag.close()

    def ask(self, wait: float = 0.0) -> None:
        """Rank 0 publishes what its inbox holds (waiting up to `wait` seconds for something); others listen."""
        header, said = torch.zeros(4, dtype=torch.int64), b""
        if self.rank == 0:
            requests = self._drain(wait)
            said = json.dumps(requests).encode() if requests else b""
            header[0] = len(said)
        self._under_way.append((self.wire.broadcast(header, 0) if self.wire else None, header, said))
        self.asked = True

    def take(self) -> list[Ticket]:
        """The requests of the first ticket asked for and not taken; the same list on every rank."""
        found = self._hear(*self._under_way[0])
        self._under_way.popleft()  # not before: else a connection that is lost meanwhile would take them with it
        return found

    @property
    def unheard(self) -> list[Ticket]:
        """What rank 0 has begun to say, and it is not known whether all have heard it."""
        return [what for _, _, said in self._under_way if said for what in json.loads(said)]

    def _hear(self, work: Any, header: torch.Tensor, said: bytes) -> list[Ticket]:
        self.asked = False
        if self.wire is None:
            return json.loads(said) if said else []
        self.wire.wait(work)
        length = int(header[0])
        if not length:
            return []
        body = torch.empty(length, dtype=torch.uint8)
        if self.rank == 0:
            body = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        self.wire.wait(self.wire.broadcast(body, 0))
        return json.loads(bytes(body.numpy()))

    def _drain(self, wait: float) -> list[Ticket]:
        found = []
        try:
            if wait:
                found.append(self.inbox.get(timeout=wait))
            while True:
                found.append(self.inbox.get_nowait())
        except queue.Empty:
            return found
