"""What it costs to bring bytes from a rank's device to its host's memory or on to disk, and back."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.fabric.link import Fabric

Hop = tuple[str, int]  # to or from "host" or "disk": so many bytes


def hop_seconds(fabric: Fabric, hops: Iterable[Hop]) -> float:
    """Seconds that these ways take, one after the other, as far as `fabric` says how fast they are."""
    rates = {"host": fabric.host, "disk": fabric.disk}
    return sum(nbytes * 1e-9 / rates[where] for where, nbytes in hops if rates[where])


class Ways:
    """When the ways of one rank are free again: what is asked for meanwhile queues."""

    def __init__(self) -> None:
        self._free: dict[str, float] = {}

    def occupy(self, fabric: Fabric, now: float, hops: Iterable[Hop], out: bool) -> float:
        """When bytes have gone these ways, beginning now at the earliest. Between device and host in and out do not
        disturb each other; a disk does one thing at a time.
        """
        at = now
        for hop in hops:
            way = hop[0] if hop[0] == "disk" else f"{hop[0]} {'out' if out else 'in'}"
            begins = max(at, self._free.get(way, 0.0))
            at = self._free[way] = begins + hop_seconds(fabric, [hop])
        return at
