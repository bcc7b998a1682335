"""gloo: collectives that the host carries out, and that it waits for in slices.

[Note: What gloo misses] A rank that is about to be told that its bytes are out when the peer closes may never be told
(seen in waitSend of torch 2.13: a rank whose peers had what it sent, and failed over it, waited for its time limit of
ten minutes). So who has waited for MISSED seconds since a peer was seen to be gone is told here. As long as that,
because the first to be done at a run's end closes while others may still exchange their last words.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.device.chip import Chip

LOOPBACK = "127.0.0.1"
SLICE = timedelta(milliseconds=100)
MISSED = 5.0  # seconds


class Gloo:
    """One process group over gloo. `precise` makes mismatched collectives a clean error, at several times the cost."""

    carried: frozenset[torch.dtype] | None = None  # dtypes that it adds; None: it says itself what it cannot
    lent = False  # does somebody else issue on this group, too?

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float, here: str = LOOPBACK,
                 precise: bool = False, **_: Any) -> None:
        before = _sockets()
        self.group = self._made(store, rank, size, here, timedelta(seconds=timeout), precise)
        self._fds = _sockets() - before if size > 1 else set()

    def issued(self, work: Any) -> Any:
        return work

    def look(self) -> None:
        """Raises what this group has met with since; a wait over gloo says so itself."""

    def wait(self, work: Any, check: Callable[[], None]) -> None:
        """Blocks the host until `work` is done; `check` is called in between and raises when this rank must leave.

        Raises ConnectionError when a peer has been gone for long. See [Note: What gloo misses].
        """
        gone: float | None = None
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
            check()
            if not self.parted():
                continue
            gone = gone or time.monotonic()
            if time.monotonic() - gone > MISSED:
                raise ConnectionError("Connection closed by peer, as its sockets show; the collective did not end")

    finish = wait

    def cut(self) -> None:
        """Ends everything that is under way here and at the peers, by shutting the group's sockets.

        gloo's own abort frees nobody. Only connected sockets are shut: shutting the listener ends the process.
        """
        for fd, inode in self._fds:
            try:
                if os.fstat(fd).st_ino != inode:
                    continue  # closed, and its number is another's by now
                with socket.socket(fileno=os.dup(fd)) as s:
                    s.getpeername()
                    s.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def parted(self) -> bool:
        """Has a peer closed its end, or ended? gloo then closes the socket here, too."""
        for fd, inode in self._fds:
            try:
                if os.fstat(fd).st_ino != inode:
                    return True
            except OSError:
                return True
        return False

    def close(self) -> None:
        self.group = None
        self._fds = set()

    @staticmethod
    def _made(store: Any, rank: int, size: int, here: str, limit: timedelta, precise: bool) -> Any:
        group = dist.ProcessGroup(store, rank, size)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub knows another name
        options._devices = [_device(here)]
        options._timeout = limit
        backend: Any = dist.ProcessGroupGloo(store, rank, size, options)
        backend._set_sequence_number_for_group()
        if precise:
            backend = dist.distributed_c10d._create_process_group_wrapper(
                wrapped_pg=backend, store_prefix=f"precise{id(group)}" if size == 1 else "precise",
                store=store, rank=rank, world_size=size, timeout=limit,
            )
        name = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(name)
        for device_type in Chip.carries_gloo():
            group._register_backend(torch.device(device_type), name, backend)
        return group


def _device(here: str) -> Any:
    """Where gloo listens: at this address, or among several hosts at the interface that GLOO_SOCKET_IFNAME names.

    Left to itself it takes what the host's name stands for, which is the loopback where that is not known.
    """
    if here != LOOPBACK and (interface := os.environ.get("GLOO_SOCKET_IFNAME")):
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=here)


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's open sockets, found without /proc. Numbers alone are soon reused."""
    found = set()
    for fd in range(3, 1024):
        try:
            about = os.fstat(fd)
            if stat.S_ISSOCK(about.st_mode):
                found.add((fd, about.st_ino))
        except OSError:
            continue
    return found
