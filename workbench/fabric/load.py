"""What a step costs under a Fabric and a pace, read alike by both hosts: shares of compute, faults, ports."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.fabric._base import Fault
from workbench.fabric.link import Fabric, Load

SHARES = {"forward": 0.3, "backward": 0.6, "update": 0.1}  # of a step's compute, where `pace` states it


def stretch(faults: Iterable[Fault], rank: int, step: int, phase: str) -> float:
    """How many times longer than healthy a phase of compute lasts on `rank` at `step`."""
    factor = 1.0
    for fault in faults:
        factor *= fault.stretch(rank, step, phase)
    return factor


def choke(faults: Iterable[Fault], rank: int) -> float:
    """How many times longer than healthy the port of `rank` is busy."""
    factor = 1.0
    for fault in faults:
        factor *= fault.choke(rank)
    return factor


def pauses(old: Iterable[Fault], new: Iterable[Fault], rank: int) -> float:
    """Seconds for which `rank` stands still because of faults in `new` that were not yet in `old`."""
    known, seconds = list(old), 0.0
    for fault in new:
        if fault in known:
            known.remove(fault)
        else:
            seconds += fault.pause(rank)
    return seconds


def port_seconds(fabric: Fabric, load: Load) -> float:
    """Seconds for which a collective keeps the busiest port, if healthy, or the one that all share; without jitter."""
    return fabric.link.seconds(load.total if fabric.shared else load.busiest, load.messages)
