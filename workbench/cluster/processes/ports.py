"""Finds ports that a controller lost between choosing and binding them."""

from __future__ import annotations

import socket
from typing import Any

import psutil

ALL = frozenset(range(1 << 16))


def list_ports(about: dict[str, Any]) -> set[int]:
    """Returns the ports in a connection file: every number, also in lists."""
    found = (value if isinstance(value, list) else [value] for value in about.values())
    return {port for some in found for port in some if type(port) is int}


def list_listened(pid: int) -> frozenset[int]:
    """Returns the TCP ports of a process and its children: none if it is gone, all if the system does not tell."""
    try:
        process = psutil.Process(pid)
        found = [c for each in [process, *process.children(recursive=True)] for c in each.net_connections("tcp")]
    except psutil.AccessDenied:
        return ALL
    except psutil.Error:
        return frozenset()
    return frozenset(c.laddr.port for c in found if c.status == psutil.CONN_LISTEN)


def is_taken(port: int) -> bool:
    """Whether another process has this loopback port."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
