"""Link, a rank's port in the emulated network. The bytes and messages of collectives."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from workbench.settings import knob, normalise


@dataclass(frozen=True, kw_only=True)
class Link:
    """Each rank's own full-duplex port. Bandwidth 0 means that nothing is shaped."""

    bandwidth: float = knob(0.0, 0.0, 1e7, unit="Mbit/s", log=True, doc="bandwidth of each rank's port; 0: unlimited")
    latency: float = knob(0.0, 0.0, 1000.0, unit="ms", doc="latency of one message between two ranks")
    jitter: float = knob(0.0, 0.0, 1.0, doc="largest random extra share of an operation's time")

    def __post_init__(self) -> None:
        normalise(self)

    @property
    def shaped(self) -> bool:
        """Whether it limits the bandwidth or adds a latency."""
        return bool(self.bandwidth or self.latency)

    def seconds(self, nbytes: float, messages: int) -> float:
        """Returns the seconds for which consecutive messages occupy a port, without jitter.

        nbytes:    their bytes in total
        messages:  their number
        """
        wire = nbytes * 8e-6 / self.bandwidth if self.bandwidth else 0.0
        return messages * self.latency * 1e-3 + wire

    def noise(self, seed: int, number: int) -> float:
        """Returns the factor >= 1 on the duration of an operation, the same on every rank.

        seed:    the experiment's seed
        number:  the operation's number, from 0
        """
        return 1.0 + self.jitter * Random(f"{seed}/{number}").random() if self.jitter else 1.0


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

    `nbytes` is the size of the rank's input: the whole vector of an all-reduce, its own chunk of an all-gather. The
    algorithms are rings. See Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 2009.

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
        case "all_to_allv":
            return nbytes, p - 1
        case "send":
            return nbytes, 1
    raise ValueError(f"{verb} is not a collective")
