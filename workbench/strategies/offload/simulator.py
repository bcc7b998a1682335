"""Performs the verbs for offloaded state on a virtual rank. State moves at once, and takes its time after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from workbench.rank import Op
from workbench.strategies.offload.offloaded_state import Hops, OffloadedState


class OffloadHost(OffloadedState, Protocol):
    """What the performer uses of a virtual rank: its tensors, or its sizes only."""

    def answer_transfer(self, fiber: Any, op: Op, hops: Hops, value: Any, out: bool) -> Any:
        """Answers with `value` after the time of these hops. out: off the device"""


class OffloadPerformer:
    """Moves state off the device and back."""

    def __init__(self, host: OffloadHost) -> None:
        self._host = host
        self.verbs: dict[str, Callable[[Any, Op], Any]] = {"offload": self.offload_shard, "fetch": self.fetch_shard}

    def offload_shard(self, fiber: Any, op: Op) -> Any:
        hops = self._host.offload_state(*op.args)
        return self._host.answer_transfer(fiber, op, hops, None, out=True)

    def fetch_shard(self, fiber: Any, op: Op) -> Any:
        value, hops = self._host.fetch_state(*op.args)
        return self._host.answer_transfer(fiber, op, hops, value, out=False)
