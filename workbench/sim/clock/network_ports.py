"""Prices network operations: each rank has one port, which all its lanes and messages share.

A shaped Link follows the engine's shaping exactly. Time starts when the last rank arrives, operations queue on the
port, and sending and receiving do not slow each other. On other Links a collective takes the measured time, or none. A
collective on a shaped Link never ends before its real transfer: short ones wait for processes that share a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from workbench.fabric import Fabric, Link, Load, even, traffic
from workbench.fabric.load import choke, comes, leaves, message_seconds, port_seconds
from workbench.rank import Group
from workbench.sim.costs.costs import Costs

MIN_FLAG_SECONDS = 1e-5  # to agree on one flag; with 0 an idle background would not end


class Ports:
    """The ports of all ranks."""

    def __init__(self, size: int, costs: Costs | None, seed: int) -> None:
        self.size, self.costs, self.seed = size, costs, seed
        self.free = np.zeros(size)  # when each port can send again
        self.taken = [0.0] * size  # when each port can receive again
        self._messages = [0] * size
        self._chokes: dict[Fabric, np.ndarray] = {}
        self._price = lru_cache(maxsize=4096)(self._compute_price)

    def price_collective(
        self, now: float, fabric: Fabric, load: Load, number: int, group: Group | None, ranks: Sequence[int]
    ) -> tuple[float, np.ndarray | float, float]:
        """Returns the `number`-th collective of a lane at its last arrival: (begin, each port's end, end for all).

        ranks: the simulated ranks of the group
        """
        here = slice(0, len(ranks)) if group is None else list(ranks)
        began = max(now, float(self.free[here].max()))
        link = self.find_link(fabric, group)
        plain = self._price(link, fabric.shared, load, 1 if group is None else group.parallel)
        if not link.shaped:
            end = began + plain
            self.free[here] = end
            return began, end, end
        noise = link.noise(self.seed, number)
        if not fabric.faults:
            end = began + plain * noise
            own: np.ndarray | float = end
        else:
            chokes = self.port_slowdowns(fabric)[here]
            end = began + plain * float(chokes.max()) * noise
            own = began + plain * chokes * noise
        self.free[here] = end
        if self.costs is None:
            return began, own, end
        wire = self.costs.linked if any(self.costs.linked) else self.costs.wire
        bare = wire.compute_seconds(load.busiest, load.messages)  # the real transfer runs first, then ranks sleep
        return began, own, now + expect_later_end(end + self.costs.late - now, bare)

    def price_message(
        self, now: float, fabric: Fabric, source: int, to: int, nbytes: int
    ) -> tuple[float, float, float]:
        """Returns when the message (begins to leave, has left, has arrived)."""
        if source == to:
            return now, now, now
        self._messages[source] += 1
        link = fabric.path(sorted((source, to)))
        if link.shaped:
            seconds = message_seconds(fabric, nbytes, self.size, self.seed, source, to, self._messages[source])
        else:
            seconds = self._message_seconds(link, fabric, nbytes)
        out = into = seconds
        if fabric.faults:
            slow = self.port_slowdowns(fabric)
            out, into = seconds * float(slow[source]), seconds * float(max(slow[source], slow[to]))
        began, left = leaves(now, float(self.free[source]), out)
        self.free[source] = left
        come = self.taken[to] = comes(began, self.taken[to], into)
        return began, left, come

    def _message_seconds(self, link: Link, fabric: Fabric, nbytes: int) -> float:
        """Returns seconds on an unshaped Link: as measured for messages, or a collective's price."""
        if self.costs is not None and any(self.costs.post):
            return self.costs.post.compute_seconds(nbytes, 1)
        return self._price(link, fabric.shared, even("send", nbytes, self.size))

    def find_link(self, fabric: Fabric, group: Group | None) -> Link:
        return fabric.path(range(self.size) if group is None else group.ranks)

    def flag_seconds(self) -> float:
        """The seconds to agree on one flag. Other traffic does not matter."""
        return max(
            MIN_FLAG_SECONDS,
            self.costs.wire.compute_seconds(*traffic("all_reduce", 8, self.size)) if self.costs else 0.0,
        )

    def port_slowdowns(self, fabric: Fabric) -> np.ndarray:
        """Returns (size,): the factor by which each port is slower than a healthy one."""
        found = self._chokes.get(fabric)
        if found is None:
            found = self._chokes[fabric] = np.array([choke(fabric.faults, r) for r in range(self.size)])
        return found

    def _compute_price(self, link: Link, shared: bool, load: Load, parallel: int = 1) -> float:
        if link.shaped:
            return port_seconds(link, shared, load, parallel)
        return self.costs.wire.compute_seconds(load.busiest, load.messages) if self.costs else 0.0


def expect_later_end(own: float, bare: float) -> float:
    """Returns the expected seconds until both the shaping and the real transfer have ended.

    own, bare: seconds of both; the real ones are uniform in [0, `2 * bare`], because processes take turns
    """
    return own if own >= 2 * bare else own + (2 * bare - own) ** 2 / (4 * bare)
