"""What a step costs under a Fabric and a pace, read alike by both hosts: faults, ports."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from workbench.fabric._base import Fault
from workbench.fabric.link import Fabric, Link, Load


def stretch(faults: Iterable[Fault], rank: int, step: int, phase: str) -> float:
    """How many times longer than healthy a phase of compute lasts on `rank` at `step`."""
    factor = 1.0
    for fault in faults:
        factor *= fault.stretch(rank, step, phase)
    return factor


def idle(fabric: Fabric, servers: Collection[int] = (), ranks: int = 2) -> list[str]:
    """The faults of `fabric` that have no effect, each in a sentence that says why and what would have one.

    servers: the ranks that do not train, and so compute nothing that could be slow. ranks: how many there are.
    """
    found = []
    for fault in fabric.faults:
        why = fault.idle(fabric.shaped and ranks > 1)
        if why is None and _of_compute(fault) and fault.rank in servers:  # type: ignore[attr-defined]
            why = f"rank {fault.rank} is a server and computes no steps; take a rank that trains"  # type: ignore[attr-defined]
        if why:
            found.append(f"{fault} has no effect: {why}")
    return found


def _of_compute(fault: Fault) -> bool:
    """Does it do something to what one rank computes, and to nothing else?"""
    rank = getattr(fault, "rank", None)
    return rank is not None and fault.choke(rank) == 1.0 and not fault.crashes(rank)


def choke(faults: Iterable[Fault], rank: int) -> float:
    """How many times longer than healthy the port of `rank` is busy."""
    factor = 1.0
    for fault in faults:
        factor *= fault.choke(rank)
    return factor


def pauses(old: Iterable[Fault], new: Iterable[Fault], rank: int) -> float:
    """Seconds for which `rank` stands still because of faults in `new` that were not yet in `old`."""
    return sum(fault.pause(rank) for fault in begun(old, new))


def crashed(old: Iterable[Fault], new: Iterable[Fault], ranks: int) -> set[int]:
    """Which of so many `ranks` are ended by faults in `new` that were not yet in `old`."""
    return {rank for fault in begun(old, new) for rank in range(ranks) if fault.crashes(rank)}


def begun(old: Iterable[Fault], new: Iterable[Fault]) -> list[Fault]:
    """The faults in `new` that were not yet in `old`."""
    known, found = list(old), []
    for fault in new:
        if fault in known:
            known.remove(fault)
        else:
            found.append(fault)
    return found


def message_seconds(
    fabric: Fabric, nbytes: int, size: int, seed: int, source: int, to: int, number: int
) -> float:
    """Seconds for which the `number`-th message of `source` keeps a healthy port, or the one that all `size` share."""
    link = fabric.path(sorted((source, to)))
    return link.seconds(nbytes * (size if fabric.shared else 1), 1) * link.noise(seed + source, number)


def leaves(now: float, free: float, seconds: float) -> tuple[float, float]:
    """When a message begins to leave a port that is free again at `free`, and when it has left."""
    begins = max(now, free)
    return begins, begins + seconds


def comes(begun: float, taken: float, seconds: float) -> float:
    """When a message that began to leave at `begun` has come in at a port that takes in another until `taken`."""
    return max(begun, taken) + seconds


def port_seconds(link: Link, shared: bool, load: Load, parallel: int = 1) -> float:
    """Seconds for which a collective keeps the busiest port, if healthy, or the one that all share; without jitter.

    link:     over which it goes (`Fabric.path`)
    parallel: how many groups do so at once, as far as they share the port
    """
    return link.seconds(load.total * parallel if shared else load.busiest, load.messages)
