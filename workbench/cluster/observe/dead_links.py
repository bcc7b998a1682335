"""Finds dead links: two living ranks that wait for each other.

Over a dead link the peer's system acknowledges nothing, and the sender's system repeats itself. The system of a slow or
stopped process still acknowledges.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Mapping
from typing import Any

from workbench.cluster.observe.hang_diagnosis import StallVerdict
from workbench.record.process import borrow_socket

# the beginning of Linux's tcp_info: 5 bytes, 3 of flags, and 13 numbers up to tcpi_last_ack_recv
TCP_INFO_HEAD = struct.Struct("=5B3x13I")
MIN_RETRANSMISSIONS = 3  # 1.4 s or more after the first sending


def list_connections() -> list[list[Any]]:
    """Returns this process's TCP connections: [own end, other end, seconds without an acknowledgement].

    The seconds are 0.0 if nothing waits for one, or if the system does not tell (Linux does).
    """
    found = []
    for fd in map(int, os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ()):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with borrow_socket(fd) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    found.append([list(s.getsockname()[:2]), list(s.getpeername()[:2]), read_silence(s)])
        except OSError:  # closed, or only listening
            continue
    return found


def read_silence(s: socket.socket) -> float:
    """Returns the seconds for which the peer acknowledged no repeated send, or 0.0."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        said = TCP_INFO_HEAD.unpack(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_HEAD.size))
    except (OSError, struct.error):
        return 0.0
    again, probes, unacknowledged, since = said[2], said[3], said[5 + 4], said[-1]
    return since * 1e-3 if (unacknowledged and again >= MIN_RETRANSMISSIONS) or probes >= MIN_RETRANSMISSIONS else 0.0


def find_dead_links(told: Mapping[int, Any]) -> dict[tuple[int, int], float]:
    """Returns the seconds of each pair of ranks with a dead link, the smaller rank first.

    told: by rank, its `list_connections()`
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


def name_dead_link(found: StallVerdict, told: Mapping[int, Any]) -> StallVerdict:
    """Adds the dead link, if any, to a verdict of waiting ranks. Its ranks become the stalled ones."""
    pairs = find_dead_links(told)
    if not pairs:
        return found
    texts = [f"rank {a} waits for rank {b}, and rank {b} for rank {a}: no data has crossed the link between them for "
    f"{seconds:.0f} s" for (a, b), seconds in sorted(pairs.items())]  # fmt: skip
    stalled = tuple(sorted({rank for pair in pairs for rank in pair}))
    return found._replace(text="; ".join([*texts, found.text]), stalled_ranks=stalled)
