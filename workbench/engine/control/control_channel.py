"""Tickets: how all ranks receive a change before the same step.

Rank 0 publishes its inbox as a ticket: a 32-byte header on a wire of its own, then JSON if there are requests. A rank
asks for the ticket just before the update and takes it afterwards. So the ticket overlaps the update, and a change acts
on the very next step.

[Note: The flag] A meeting in every step holds up ranks that share cores, and usually brings no requests. So on one host
rank 0 raises a flag: before it begins child n, it writes n into shared memory. Child n needs rank 0, so a rank that has
completed it sees the number. So ranks with equally many completed children decide alike, without a message. The last
numbers stay visible, because rank 0 may meet and begin another child before other ranks look. It is never a step ahead,
and raises the flag at most twice in one step.

Under a pipeline that never flushes, the last stage ends a step long before the first. So that it need not wait, ranks
take a ticket as many steps later as the stages are apart.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.engine.collectives.mapped_file import map_file
from workbench.engine.collectives.wire import Wire

ControlMessage = dict[str, Any]  # one request
VISIBLE_NUMBERS = 8


class RequestFlag:
    """The last numbers, in a small file that a host's ranks share. Only rank 0 writes."""

    def __init__(self, path: Path) -> None:
        self._map = map_file(path, 8 * VISIBLE_NUMBERS)
        self._numbers = np.frombuffer(self._map, dtype=np.int64)
        self._raised = 0  # how often

    def clear_numbers(self) -> None:
        """Children are counted from 1 again."""
        self._numbers[:] = 0

    def write_number(self, number: int) -> None:
        self._numbers[self._raised % VISIBLE_NUMBERS] = number
        self._raised += 1

    def next_number(self, number: int) -> int:
        return min((n for n in self._numbers.tolist() if n > number), default=0)

    def close(self) -> None:
        self._numbers = np.zeros(VISIBLE_NUMBERS, np.int64)
        self._map.close()


class ControlChannel:
    """The control wire of one rank; only its training thread uses it. See [Note: The flag]."""

    def __init__(
        self, wire: Wire | None, rank: int, inbox: queue.SimpleQueue[ControlMessage], flag: RequestFlag | None
    ) -> None:
        self.wire, self.rank, self.inbox, self.flag = wire, rank, inbox, flag
        self._by_flag = False
        self._last_number = 0  # the last number that ranks met for
        self._raised = False
        self._under_way: deque[tuple[Any, torch.Tensor, bytes]] = deque()  # a Work, the header, rank 0's text
        self.has_pending = False

    @property
    def pending_count(self) -> int:
        """Tickets that are published or expected, and not taken."""
        return len(self._under_way)

    def notify_ranks(self, number: int) -> None:
        """On rank 0, before child `number`: raises the flag if the inbox is not empty."""
        if self._by_flag and self.flag is not None and not self._raised and not self.inbox.empty():
            self.flag.write_number(number)
            self._raised = True

    def is_due(self, done: int) -> bool:
        """Whether ranks take a ticket after child `done`."""
        if not self._by_flag:
            return True
        assert self.flag is not None
        number = self.flag.next_number(self._last_number)
        if not 0 < number <= done:
            return False
        self._last_number, self._raised = number, False
        return True

    def enter_strategy(self, strategy: Any, flat: bool) -> None:
        """The caller has set all lanes' counts to 1. torch's own strategies have no children on our lane.

        flat: whether every group contains rank 0. Another group could complete a child that rank 0 has not begun.
        """
        size = self.wire.size if self.wire else 1
        alike = flat and strategy.lockstep and not strategy.opaque and not strategy.propagation(size)
        self._by_flag = self.flag is not None and alike
        self._last_number, self._raised = 0, False
        if self.flag is not None and self.rank == 0:
            self.flag.clear_numbers()

    def close(self) -> None:
        if self.flag is not None:
            self.flag.close()

    def end_taking(self) -> None:
        self.has_pending = False

    def publish_requests(self, wait: float = 0.0) -> None:
        """Publishes rank 0's inbox, after up to `wait` seconds for a request; other ranks listen."""
        header, said = torch.zeros(4, dtype=torch.int64), b""
        if self.rank == 0:
            requests = self._drain_inbox(wait)
            said = json.dumps(requests).encode() if requests else b""
            header[0] = len(said)
        self._under_way.append((self.wire.broadcast(header, 0) if self.wire else None, header, said))
        self.has_pending = True

    def take_requests(self) -> list[ControlMessage]:
        """Returns the oldest ticket's requests, the same on every rank."""
        found = self._receive_requests(*self._under_way[0])
        self._under_way.popleft()  # not before: an error above would lose the requests
        return found

    @property
    def unheard_requests(self) -> list[ControlMessage]:
        """Requests that rank 0 has begun to publish; other ranks may not have received them."""
        return [what for _, _, said in self._under_way if said for what in json.loads(said)]

    def _receive_requests(self, work: Any, header: torch.Tensor, said: bytes) -> list[ControlMessage]:
        self.has_pending = False
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

    def _drain_inbox(self, wait: float) -> list[ControlMessage]:
        found = []
        try:
            if wait:
                found.append(self.inbox.get(timeout=wait))
            while True:
                found.append(self.inbox.get_nowait())
        except queue.Empty:
            return found
