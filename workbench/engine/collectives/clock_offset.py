"""One time for all ranks."""

from __future__ import annotations

import hashlib
import platform
import time

import torch

from workbench.engine.collectives.shaping import Clock
from workbench.engine.collectives.wire import Wire

OFFSET_ROUNDS = 16


def agree_on_time(wire: Wire, clock: Clock) -> tuple[bool, float]:
    """Sets `clock` to rank 0's. Returns (whether all ranks are on one host, error of the offset in seconds).

    Ranks of one host read the same clock, so the offset is exact. Ranks of several hosts take the middle of the
    quickest of OFFSET_ROUNDS round trips, as NTP does: the error is at most half of that trip.
    """
    name = int.from_bytes(hashlib.blake2b(platform.node().encode(), digest_size=7).digest(), "big")
    mine = torch.tensor([float(name % 2**52), clock.base], dtype=torch.float64)
    every = torch.empty(wire.size * 2, dtype=torch.float64)
    wire.wait(wire.all_gather(every, mine))
    table = every.view(wire.size, 2)
    if bool((table[:, 0] == table[0, 0]).all()):
        clock.move_base(float(table[0, 1]))
        return True, 0.0
    doubt = 0.0
    for other in range(1, wire.size):
        offset, error = _measure_offset(wire, other)
        if wire.rank == other:
            clock.move_base(float(table[0, 1]) + offset)
            doubt = error
    return False, doubt


def _measure_offset(wire: Wire, other: int) -> tuple[float, float]:
    """Returns (perf_counter of `other` minus rank 0's, half the quickest round trip). All ranks must call it.

    It uses broadcasts: gloo's send and recv cannot wait in slices, because each timeout closes every connection
    ("Application timeout caused pair closure", torch 2.13).
    """
    best = (0.0, float("inf"))
    stamp = torch.zeros(1, dtype=torch.float64)
    for _ in range(OFFSET_ROUNDS):
        sent = time.perf_counter()
        wire.wait(wire.broadcast(stamp, other))
        if wire.rank == 0:
            stamp[0] = time.perf_counter()
        wire.wait(wire.broadcast(stamp, 0))
        back = time.perf_counter()
        if back - sent < 2 * best[1]:
            best = ((sent + back) / 2 - float(stamp[0]), (back - sent) / 2)
    return best
