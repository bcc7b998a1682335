"""State of a rank that can leave its device, as both hosts offer it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workbench.rank import Bucket

Hops = list[tuple[str, int]]  # of one transfer: ("host" or "disk", bytes)


class OffloadedState(Protocol):
    """A rank's parameters, gradients and optimizer state by shard, on the device, the host or disk."""

    def offload_state(self, shard: Bucket, what: str, where: str) -> Hops:
        """Stores `what` on "host" or "disk". Returns the hops."""

    def fetch_state(self, shard: Bucket, what: str, where: str, keep: bool) -> tuple[Tensor | None, Hops]:
        """Brings `what` to "host" or "device". Returns (n,) values for the device, and the hops."""
