"""Networks by name: their cost per message (alpha) and per byte (beta), with sources."""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

from workbench.settings import KnobError, short

NCCL = "NCCL's own model of a hop around a ring (hwLat, Simple, in its src/graph/tuning.cc)"


class Network(NamedTuple):
    """A network's figures for a Fabric, with their source as a sentence.

    bandwidth: of a rank's port in one direction (Mbit/s)
    latency:   of one message (ms)
    site:      neighbours on one site. 0: all ranks; -1: half of them
    between_*: traffic that leaves a site, as in Fabric
    """

    name: str
    bandwidth: float
    latency: float
    source: str
    site: int = 0
    between_bandwidth: float = 0.0
    between_latency: float = 0.0

    def settings(self, ranks: int) -> dict[str, Any]:
        """Returns the knobs of an Experiment on this network, without jitter or faults."""
        site = -(-ranks // 2) if self.site < 0 else self.site
        return {
            "fabric.link.bandwidth": self.bandwidth, "fabric.link.latency": self.latency, "fabric.link.jitter": 0.0,
            "fabric.site": site if site < ranks else 0, "fabric.between_bandwidth": self.between_bandwidth,
            "fabric.between_latency": self.between_latency, "fabric.shared": False, "fabric.faults": (),
        }  # fmt: skip

    @property
    def text(self) -> str:
        """Returns its figures: alpha is the time of a message, beta of a byte."""
        near = _figures(self.latency, self.bandwidth)
        far = _figures(self.between_latency, self.between_bandwidth) if self.site else ""
        apart = f"; to other {'sites' if self.site < 0 else 'hosts'} {far}" if far else ""
        return f"{self.name}: {near}{apart}. {self.source}"


def _figures(latency: float, bandwidth: float) -> str:
    return f"alpha {latency * 1e3:g} us, beta {8e3 / bandwidth:.3g} ns/B ({bandwidth / 1e3:g} Gbit/s)"


NETWORKS = {
    n.name: n for n in (
        Network("10 GbE", 10_000, 0.014, f"The line rate of IEEE 802.3ae; alpha is {NCCL} over a network."),
        Network("100 GbE", 100_000, 0.014, f"The line rate of IEEE 802.3ba; alpha is {NCCL} over a network."),
        Network("400G InfiniBand", 400_000, 0.014, f"The rate of NDR, four lanes; alpha is {NCCL} over a network."),
        Network("NVLink", 3_600_000, 0.0034, f"An H100's 900 GB/s are both ways together, 450 one way (NVIDIA's data "
                f"sheet); alpha is {NCCL} over NVLink."),
        Network("hosts of 8 on NVLink, 400G InfiniBand", 3_600_000, 0.0034, "As NVLink inside of a host, as 400G "
                "InfiniBand between: one adapter per rank.", 8, 400_000, 0.014),
        Network("two sites over a WAN", 100_000, 0.014, "Inside as 100 GbE. Between sites 1 Gbit/s a rank, which is an "
                "assumption, and 15 ms: 3,000 km of fibre at 5 us/km.", -1, 1_000, 15.0),
    )
}  # fmt: skip


def network(name: str) -> Network:
    """Returns the network called `name`. Raises KnobError with the nearest name if it is unknown."""
    if not isinstance(name, str) or name not in NETWORKS:
        near = difflib.get_close_matches(str(name), NETWORKS, n=1, cutoff=0.3) or list(NETWORKS)
        raise KnobError(f"network={short(name)}: no such network; did you mean {', '.join(near)}?")
    return NETWORKS[name]
