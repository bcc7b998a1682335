"""Link and Fabric: the network that the engine shapes traffic by and the simulator prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import NamedTuple

from workbench.fabric._base import Fault
from workbench.fabric.algorithms._base import Algorithm
from workbench.fabric.algorithms.native import Native
from workbench.settings import knob, normalise


@dataclass(frozen=True, kw_only=True)
class Link:
    """Each rank's own full-duplex port. Bandwidth 0 means that nothing is shaped."""

    bandwidth: float = knob(0.0, 0.0, 1e7, unit="Mbit/s", log=True, doc="of each rank's port; 0 is unlimited")
    latency: float = knob(0.0, 0.0, 1000.0, unit="ms", doc="of one message between two ranks")
    jitter: float = knob(0.0, 0.0, 1.0, doc="largest random extra share of an operation's time")

    def __post_init__(self) -> None:
        normalise(self)

    @property
    def shaped(self) -> bool:
        return bool(self.bandwidth or self.latency)

    def seconds(self, nbytes: float, messages: int) -> float:
        """Returns how long consecutive messages of `nbytes` in total occupy a port, without jitter."""
        wire = nbytes * 8e-6 / self.bandwidth if self.bandwidth else 0.0
        return messages * self.latency * 1e-3 + wire

    def noise(self, seed: int, number: int) -> float:
        """Returns the factor >= 1 on operation `number`, the same on every rank."""
        return 1.0 + self.jitter * Random(f"{seed}/{number}").random() if self.jitter else 1.0


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The emulated network: a Link per rank, sites, an all-reduce algorithm and the injected faults.

    site:       neighbouring ranks share a site, such as a machine or a rack; traffic between sites has the smaller
                bandwidth and the larger latency of the Link and the `between_` settings
    host, disk: bandwidths for state that is kept off a rank's device (ZeROOffload, ZeROInfinity)
    """

    link: Link = knob(Link(), doc="each rank's port")
    site: int = knob(0, 0, 4096, unit="ranks", doc="neighbours on one site, fast among themselves; 0: all are")
    between_bandwidth: float = knob(0.0, 0.0, 1e7, unit="Mbit/s", log=True, doc="of a port to other sites; 0: no less")
    between_latency: float = knob(0.0, 0.0, 1000.0, unit="ms", doc="of a message to another site, if above the Link's")
    algorithm: Algorithm = knob(Native(), doc="how an all-reduce goes")
    shared: bool = knob(False, doc="all ranks send through one port together, as on a bus")
    host: float = knob(0.0, 0.0, 1e5, unit="GB/s", log=True, doc="device to its host's memory and back; 0: unlimited")
    disk: float = knob(0.0, 0.0, 1e5, unit="GB/s", log=True, doc="a rank's share of its host's disk; 0 is unlimited")
    faults: tuple[Fault, ...] = knob((), doc="faults that are injected")

    def __post_init__(self) -> None:
        normalise(self)

    @property
    def shaped(self) -> bool:
        """Whether the network emulates any path of messages."""
        return self._far.shaped if self.site else self.link.shaped

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether `ranks`, in ascending order, are on several sites."""
        return self.site > 0 and ranks[0] // self.site != ranks[-1] // self.site

    def path(self, ranks: Sequence[int]) -> Link:
        """Returns the Link for traffic among `ranks`, in ascending order.

        A collective over several sites goes around a ring, and its slowest hop sets the pace. An all-to-all has the
        same price, although a part of it stays inside a site.
        """
        return self._far if self.crosses(ranks) else self.link

    def measured(self, latency: float, bandwidth: float) -> Fabric:
        """Returns this fabric with a Link of this latency (ms) and bandwidth (Mbit/s); 0: unchanged."""
        link = replace(self.link, latency=latency or self.link.latency, bandwidth=bandwidth or self.link.bandwidth)
        return replace(self, link=link)

    @cached_property
    def _far(self) -> Link:
        rates = [rate for rate in (self.link.bandwidth, self.between_bandwidth) if rate]
        latency = max(self.link.latency, self.between_latency)
        return Link(bandwidth=min(rates, default=0.0), latency=latency, jitter=self.link.jitter)


class Load(NamedTuple):
    """The load of a collective on the ports of `size` ranks.

    sent:     bytes that this rank sends
    busiest:  bytes of the port that sends or receives most
    total:    bytes that all ranks send
    messages: number of consecutive messages
    """

    sent: int
    busiest: int
    total: int
    messages: int


def even(verb: str, nbytes: int, size: int) -> Load:
    """Returns the Load of a collective to which every rank contributes `nbytes`."""
    sent, messages = traffic(verb, nbytes, size)
    return Load(sent, sent, sent if verb == "send" else sent * size, messages)


def uneven(lengths: tuple[tuple[int, ...], ...], width: int, rank: int) -> Load:
    """Returns the Load of an all-to-all: rank i sends lengths[i][j] elements to rank j.

    A rank's data for itself and empty rows cost nothing.

    >>> uneven(((5, 1, 0), (2, 0, 0), (0, 0, 7)), 4, 1)
    Load(sent=8, busiest=8, total=12, messages=1)
    """
    p = range(len(lengths))
    out = [sum(lengths[i][j] for j in p if j != i) for i in p]
    into = [sum(lengths[i][j] for i in p if i != j) for j in p]
    messages = max(sum(lengths[i][j] > 0 for j in p if j != i) for i in p)
    return Load(out[rank] * width, max(*out, *into) * width, sum(out) * width, messages)


def traffic(verb: str, nbytes: int, size: int) -> tuple[int, int]:
    """Returns (bytes sent by one rank, consecutive messages) of a collective on `size` ranks.

    `nbytes` is the size of the rank's input: the whole vector of an all-reduce, its own chunk of an all-gather. Ring
    algorithms; see Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
    2009.

    >>> traffic("all_reduce", 4_000_000, 4)
    (6000000, 6)
    """
    p = size
    if p == 1:
        return 0, 0
    match verb:
        case "all_reduce":
            return 2 * (p - 1) * nbytes // p, 2 * (p - 1)
        case "reduce_scatter" | "all_to_all" | "broadcast":
            return (p - 1) * nbytes // p, p - 1
        case "all_gather":
            return (p - 1) * nbytes, p - 1
        case "all_to_allv":  # this rank sends `nbytes`
            return nbytes, p - 1
        case "send":
            return nbytes, 1
    raise ValueError(f"{verb} is not a collective")
