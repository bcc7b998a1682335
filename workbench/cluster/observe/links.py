"""Dead links: which two ranks wait for each other although both live, from what their systems know of their wires.

Where all ranks wait in the same, nobody's code tells who is to blame. Each rank's system does: what a rank has sent
over a link that is dead is never acknowledged, and is sent again and again. A rank that is only slow, or whose process
is stopped, is no such case, for its system goes on acknowledging.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Mapping
from typing import Any

from workbench.cluster.observe.silence import Verdict

# the beginning of Linux's tcp_info: five bytes, three of flags, and thirteen numbers up to when the last word came
INFO = struct.Struct("=5B3x13I")
AGAIN = 3  # so often was something sent again, 1.4 s or more after it first was, before it counts


def wires() -> list[list[Any]]:
    """This process's TCP connections: [own end, other end, seconds for which the other has acknowledged nothing].

    0.0 where nothing waits for that, or where the system does not tell (Linux does).
    """
    found = []
    for fd in map(int, os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ()):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    found.append([list(s.getsockname()[:2]), list(s.getpeername()[:2]), unheard(s)])
        except OSError:  # closed meanwhile, or it only listens
            continue
    return found


def unheard(s: socket.socket) -> float:
    """Seconds for which the peer has acknowledged nothing of what was sent to it again and again; else 0.0."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        said = INFO.unpack(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size))
    except (OSError, struct.error):
        return 0.0
    again, probes, unacknowledged, since = said[2], said[3], said[5 + 4], said[-1]
    return since * 1e-3 if (unacknowledged and again >= AGAIN) or probes >= AGAIN else 0.0


def dead(told: Mapping[int, Any]) -> dict[tuple[int, int], float]:
    """Pairs of ranks, the smaller first, between whom nothing gets through, and for how many seconds.

    told: by rank, what `wires` found there
    """
    said = {rank: ends for rank, ends in told.items() if isinstance(ends, list)}
    whose = {tuple(mine): rank for rank, ends in said.items() for mine, _, _ in ends}
    found: dict[tuple[int, int], float] = {}
    for rank, ends in said.items():
        for _, theirs, seconds in ends:
            other = whose.get(tuple(theirs), rank)
            if seconds and other != rank:
                pair = min(rank, other), max(rank, other)
                found[pair] = max(found.get(pair, 0.0), seconds)
    return found


def named(found: Verdict, told: Mapping[int, Any]) -> Verdict:
    """`found`, that all ranks wait, with the link that is dead, if one is; the ranks at its ends are the odd ones."""
    pairs = dead(told)
    if not pairs:
        return found
    texts = [f"rank {a} waits for rank {b}, and rank {b} for rank {a}: nothing has got over the link between them for "
             f"{seconds:.0f} s" for (a, b), seconds in sorted(pairs.items())]  # fmt: skip
    odd = tuple(sorted({rank for pair in pairs for rank in pair}))
    return found._replace(text="; ".join([*texts, found.text]), odd=odd)
