"""Fabric: the network that the engine emulates and the simulator prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.fabric._base import Fault
from workbench.fabric.algorithms._base import Algorithm
from workbench.fabric.algorithms.native import Native
from workbench.fabric.link import Link
from workbench.settings import knob, normalise


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The emulated network: a Link per rank, sites, an all-reduce algorithm and faults.

    site:       neighbouring ranks share a site, such as a machine or a rack. Traffic between sites has the smaller
                bandwidth and the larger latency of the Link and the `between_` settings
    host, disk: bandwidths for state that is kept off a rank's device (ZeROOffload and ZeROInfinity)
    ranks:      in methods: numbers of ranks in ascending order
    """

    link: Link = knob(Link(), doc="each rank's port")
    site: int = knob(0, 0, 4096, unit="ranks", doc="neighbours on one site, with fast links; 0: all ranks")
    between_bandwidth: float = knob(
        0.0, 0.0, 1e7, unit="Mbit/s", log=True, doc="bandwidth of a port to other sites; 0: the Link's"
    )
    between_latency: float = knob(
        0.0, 0.0, 1000.0, unit="ms", doc="latency of a message to another site, if above the Link's"
    )
    algorithm: Algorithm = knob(Native(), doc="the algorithm of an all-reduce")
    shared: bool = knob(False, doc="all ranks send through one port together, as on a bus")
    host: float = knob(0.0, 0.0, 1e5, unit="GB/s", log=True, doc="between a device and its host's memory; 0: unlimited")
    disk: float = knob(0.0, 0.0, 1e5, unit="GB/s", log=True, doc="a rank's share of its host's disk; 0: unlimited")
    faults: tuple[Fault, ...] = knob((), doc="injected faults")

    def __post_init__(self) -> None:
        normalise(self)

    @property
    def shaped(self) -> bool:
        """Whether the network emulates any path of messages."""
        return self._far.shaped if self.site else self.link.shaped

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether `ranks` are on several sites."""
        return self.site > 0 and ranks[0] // self.site != ranks[-1] // self.site

    def path(self, ranks: Sequence[int]) -> Link:
        """Returns the Link for traffic among `ranks`.

        A collective over several sites goes around a ring, and its slowest hop sets the pace. An all-to-all has the
        same price, although a part of it stays inside a site.
        """
        return self._far if self.crosses(ranks) else self.link

    def split_port(self, size: int) -> Fabric:
        """Returns the fabric with `size` separate ports in place of a shared one, `size` times as slow.

        For costs that are computed group by group: the load of all ranks slows a bus, not that of one group.

        size:  number of ranks that share the port
        """
        if not self.shared:
            return self
        link, between = self.link.bandwidth / size, self.between_bandwidth / size
        return replace(self, shared=False, link=replace(self.link, bandwidth=link), between_bandwidth=between)

    def measured(self, latency: float, bandwidth: float) -> Fabric:
        """Returns this fabric with the latency and bandwidth of a measured Link.

        latency:    of a message, in ms. 0: unchanged
        bandwidth:  of a port, in Mbit/s. 0: unchanged
        """
        link = replace(self.link, latency=latency or self.link.latency, bandwidth=bandwidth or self.link.bandwidth)
        return replace(self, link=link)

    @cached_property
    def _far(self) -> Link:
        rates = [rate for rate in (self.link.bandwidth, self.between_bandwidth) if rate]
        latency = max(self.link.latency, self.between_latency)
        return Link(bandwidth=min(rates, default=0.0), latency=latency, jitter=self.link.jitter)
