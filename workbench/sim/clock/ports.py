"""What crossing the network costs: each rank's one port, shared by all its lanes and messages.

On a shaped Link exactly as the engine shapes: time runs from the arrival of the last participant, operations queue
on the port, in and out do not disturb each other. Off a Link by the measured cost of a collective, if there is one;
on one none ends before its transfer does, either: a short one waits for processes to take turns, not for the Link.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from workbench.fabric import Fabric, Link, Load, even, traffic
from workbench.fabric.load import choke, comes, leaves, message_seconds, port_seconds
from workbench.rank import Group
from workbench.sim.costs.costs import Costs

FLAG = 1e-5  # seconds that agreeing on one bit takes at least, so that a background that does nothing still ends


class Ports:
    """The ports of all ranks."""

    def __init__(self, size: int, costs: Costs | None, seed: int) -> None:
        self.size, self.costs, self.seed = size, costs, seed
        self.free = np.zeros(size)  # when each port is free again to send
        self.taken = [0.0] * size  # and to take in
        self._messages = [0] * size
        self._chokes: dict[Fabric, np.ndarray] = {}
        self._price = lru_cache(maxsize=4096)(self._priced)

    def meet(
        self, now: float, fabric: Fabric, load: Load, number: int, group: Group | None, ranks: Sequence[int]
    ) -> tuple[float, np.ndarray | float, float]:
        """The `number`-th collective of a lane, whose last rank has come: (began, each port's end, end for all).

        ranks: those of the group that are simulated
        """
        here = slice(0, len(ranks)) if group is None else list(ranks)
        began = max(now, float(self.free[here].max()))
        link = self.path(fabric, group)
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
            chokes = self.chokes(fabric)[here]
            end = began + plain * float(chokes.max()) * noise
            own = began + plain * chokes * noise
        self.free[here] = end
        if self.costs is None:
            return began, own, end
        wire = self.costs.linked if any(self.costs.linked) else self.costs.wire
        bare = wire.seconds(load.busiest, load.messages)  # it really happens first, then ranks sleep
        return began, own, now + later(end + self.costs.late - now, bare)

    def post(self, now: float, fabric: Fabric, source: int, to: int, nbytes: int) -> tuple[float, float, float]:
        """A message: (when it begins to leave, when it has left, when it has come)."""
        if source == to:
            return now, now, now
        self._messages[source] += 1
        link = fabric.path(sorted((source, to)))
        if link.shaped:
            seconds = message_seconds(fabric, nbytes, self.size, self.seed, source, to, self._messages[source])
        else:
            seconds = self._posted(link, fabric, nbytes)
        out = into = seconds
        if fabric.faults:
            slow = self.chokes(fabric)
            out, into = seconds * float(slow[source]), seconds * float(max(slow[source], slow[to]))
        began, left = leaves(now, float(self.free[source]), out)
        self.free[source] = left
        come = self.taken[to] = comes(began, self.taken[to], into)
        return began, left, come

    def _posted(self, link: Link, fabric: Fabric, nbytes: int) -> float:
        """Seconds of a message off any Link: what one was measured to take; else what a collective would."""
        if self.costs is not None and any(self.costs.post):
            return self.costs.post.seconds(nbytes, 1)
        return self._price(link, fabric.shared, even("send", nbytes, self.size))

    def path(self, fabric: Fabric, group: Group | None) -> Link:
        """Over which Link a collective of a group, or of all ranks, goes."""
        return fabric.path(range(self.size) if group is None else group.ranks)

    def flag(self) -> float:
        """Seconds that it takes to agree on one bit, beside all traffic."""
        return max(FLAG, self.costs.wire.seconds(*traffic("all_reduce", 8, self.size)) if self.costs else 0.0)

    def chokes(self, fabric: Fabric) -> np.ndarray:
        """(size,) how many times longer than healthy each port is busy."""
        found = self._chokes.get(fabric)
        if found is None:
            found = self._chokes[fabric] = np.array([choke(fabric.faults, r) for r in range(self.size)])
        return found

    def _priced(self, link: Link, shared: bool, load: Load, parallel: int = 1) -> float:
        if link.shaped:
            return port_seconds(link, shared, load, parallel)
        return self.costs.wire.seconds(load.busiest, load.messages) if self.costs else 0.0


def later(own: float, bare: float) -> float:
    """Which of two ends is expected: a Link's own, after so many seconds, or that of a transfer which takes `bare`.

    What processes that take turns on a core wait for each other is spread evenly from 0 to twice its mean.
    """
    return own if own >= 2 * bare else own + (2 * bare - own) ** 2 / (4 * bare)
