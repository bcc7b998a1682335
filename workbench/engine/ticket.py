"""Tickets: how all ranks learn of a change before the same step.

Rank 0 reads its inbox and publishes one ticket per meeting: a 32-byte header on a wire of its own, followed by
JSON only when there is something to say. It is asked for just before the update and taken after it, so it hides
behind the update and a change acts on the very next step.
"""

from __future__ import annotations

import json
import queue
from typing import Any

import torch

from workbench.engine.collectives import Wire

Ticket = dict[str, Any]  # {"requests": [...]} and nothing else; an empty one is None


class Tickets:
    """The control wire of one rank, used by its training thread only."""

    def __init__(self, wire: Wire | None, rank: int, inbox: queue.SimpleQueue[Ticket]) -> None:
        self.wire, self.rank, self.inbox = wire, rank, inbox
        self._header = torch.zeros(4, dtype=torch.int64)
        self._work: Any = None
        self._body = b""

    @property
    def asked(self) -> bool:
        return self._work is not None

    def ask(self, wait: float = 0.0) -> None:
        """Rank 0 publishes what its inbox holds (waiting up to `wait` seconds for something); others listen."""
        if self.rank == 0:
            requests = self._drain(wait)
            self._body = json.dumps(requests).encode() if requests else b""
            self._header[0] = len(self._body)
        self._work = self.wire.broadcast(self._header, 0) if self.wire else True

    def take(self) -> list[Ticket]:
        """The requests of the ticket asked for; the same list on every rank."""
        work, self._work = self._work, None
        if self.wire is None:
            return json.loads(self._body) if self._body else []
        self.wire.wait(work)
        length = int(self._header[0])
        if not length:
            return []
        body = torch.empty(length, dtype=torch.uint8)
        if self.rank == 0:
            body = torch.frombuffer(bytearray(self._body), dtype=torch.uint8)
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
