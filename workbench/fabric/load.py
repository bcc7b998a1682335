"""The cost of compute, pauses and messages under a Fabric."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from workbench.fabric._base import Fault
from workbench.fabric.fabric import Fabric
from workbench.fabric.link import Link, Load


def stretch(faults: Iterable[Fault], rank: int, step: int, phase: str) -> float:
    """Returns the factor on the duration of a compute phase on `rank` at `step`."""
    factor = 1.0
    for fault in faults:
        factor *= fault.stretch(rank, step, phase)
    return factor


def idle(fabric: Fabric, servers: Collection[int] = (), ranks: int = 2) -> list[str]:
    """Returns a sentence for each fault without effect: why, and what to do instead.

    servers: ranks that do not train, so they compute nothing that a fault could slow
    """
    found = []
    for fault in fabric.faults:
        why = fault.idle(fabric.shaped and ranks > 1)
        if why is None and _of_compute(fault) and fault.rank in servers:  # type: ignore[attr-defined]
            why = f"rank {fault.rank} is a server and computes no steps; choose a rank that trains"  # type: ignore[attr-defined]
        if why:
            found.append(f"{fault} has no effect: {why}")
    return found


def _of_compute(fault: Fault) -> bool:
    rank = getattr(fault, "rank", None)
    return rank is not None and fault.choke(rank) == 1.0 and not fault.crashes(rank)


def choke(faults: Iterable[Fault], rank: int) -> float:
    """Returns the factor on the time that the port of `rank` is busy."""
    factor = 1.0
    for fault in faults:
        factor *= fault.choke(rank)
    return factor


def pauses(old: Iterable[Fault], new: Iterable[Fault], rank: int) -> float:
    """Returns the seconds that `rank` stalls by faults that `new` has and `old` lacks."""
    return sum(fault.pause(rank) for fault in begun(old, new))


def crashed(old: Iterable[Fault], new: Iterable[Fault], ranks: int) -> set[int]:
    """Returns the ranks below `ranks` that end by faults that `new` has and `old` lacks."""
    return {rank for fault in begun(old, new) for rank in range(ranks) if fault.crashes(rank)}


def begun(old: Iterable[Fault], new: Iterable[Fault]) -> list[Fault]:
    """Returns the faults in `new` that were not in `old`."""
    known, found = list(old), []
    for fault in new:
        if fault in known:
            known.remove(fault)
        else:
            found.append(fault)
    return found


def message_seconds(fabric: Fabric, nbytes: int, size: int, seed: int, source: int, to: int, number: int) -> float:
    """Returns how long message `number` of `source` occupies its healthy or the shared port."""
    link = fabric.path(sorted((source, to)))
    return link.seconds(nbytes * (size if fabric.shared else 1), 1) * link.noise(seed + source, number)


def leaves(now: float, free: float, seconds: float) -> tuple[float, float]:
    """Returns when a message begins to leave a port that is free at `free`, and when it has left."""
    begins = max(now, free)
    return begins, begins + seconds


def comes(begun: float, taken: float, seconds: float) -> float:
    """Returns when a message that began to leave at `begun` has arrived at a port busy until `taken`."""
    return max(begun, taken) + seconds


def port_seconds(link: Link, shared: bool, load: Load, parallel: int = 1) -> float:
    """Returns how long a collective occupies the busiest or the shared port, without jitter.

    link:     its link (`Fabric.path`)
    parallel: how many groups run it at the same time, which matters on a shared port
    """
    return link.seconds(load.total * parallel if shared else load.busiest, load.messages)
