"""The cost of moving bytes between a rank's device and its host's memory or disk."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.fabric.fabric import Fabric

Hop = tuple[str, int]  # ("host" or "disk", bytes moved there or back)


def hop_seconds(fabric: Fabric, hops: Iterable[Hop]) -> float:
    """Returns the seconds of consecutive transfers, as far as `fabric` has their bandwidths."""
    rates = {"host": fabric.host, "disk": fabric.disk}
    return sum(nbytes * 1e-9 / rates[where] for where, nbytes in hops if rates[where])


class Ways:
    """When each path of one rank is free again. Transfers on a busy path queue."""

    def __init__(self) -> None:
        self._free: dict[str, float] = {}

    def occupy(self, fabric: Fabric, now: float, hops: Iterable[Hop], out: bool) -> float:
        """Returns when bytes that start at `now` or later have passed these hops in order.

        Device and host exchange in both directions at once. A disk serves one transfer at a time.
        """
        at = now
        for hop in hops:
            way = hop[0] if hop[0] == "disk" else f"{hop[0]} {'out' if out else 'in'}"
            begins = max(at, self._free.get(way, 0.0))
            at = self._free[way] = begins + hop_seconds(fabric, [hop])
        return at
