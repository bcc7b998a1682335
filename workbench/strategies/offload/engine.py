"""Performs the verbs for offloaded state on a real rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from workbench.rank import Op
from workbench.strategies.offload.offloaded_state import Hops, OffloadedState
from workbench.strategies.offload.verbs import VERBS

OFFLOAD_VERBS = frozenset(VERBS)


class OffloadHost(OffloadedState, Protocol):
    """What the performer uses of a real rank."""

    def read_clock(self) -> float: ...
    def record_transfer(self, op: Op, step: int, began: float, hops: Hops, out: bool) -> None:
        """Waits until these hops are over at the Fabric's speed, and records them. out: off the device"""


class OffloadPerformer:
    """Moves state off the device and back. A verb takes its Op and the step that it belongs to."""

    def __init__(self, host: OffloadHost) -> None:
        self._host = host
        self.verbs: dict[str, Callable[[Op, int], Any]] = {"offload": self.offload_shard, "fetch": self.fetch_shard}

    def offload_shard(self, op: Op, step: int) -> None:
        began = self._host.read_clock()
        hops = self._host.offload_state(*op.args)
        self._host.record_transfer(op, step, began, hops, out=True)

    def fetch_shard(self, op: Op, step: int) -> Tensor | None:
        began = self._host.read_clock()
        value, hops = self._host.fetch_state(*op.args)
        self._host.record_transfer(op, step, began, hops, out=False)
        return value
