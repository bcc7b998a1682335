"""gloo: collectives that the host runs and waits for in slices.

[Note: What gloo misses] If a peer closes just before gloo reports a rank's bytes as sent, the rank may wait for its
time limit of 10 minutes. This was seen in waitSend of torch 2.13, when peers failed after they had received the bytes.
So `wait` raises ConnectionError MISSED seconds after it has noticed that a peer is gone. It does not raise at once: the
first rank that ends a run closes its group while other ranks may still exchange their last messages.
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
    """One process group over gloo.

    precise: makes mismatched collectives raise a clean error, at several times the cost
    """

    carried: frozenset[torch.dtype] | None = None  # dtypes that it adds; None: gloo raises the error itself
    lent = False  # whether other code issues on this group, too

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float, here: str = LOOPBACK,
                 precise: bool = False, **_: Any) -> None:
        before = _sockets()
        self.group = self._made(store, rank, size, here, timedelta(seconds=timeout), precise)
        self._fds = _sockets() - before if size > 1 else set()

    def issued(self, work: Any) -> Any:
        return work

    def look(self) -> None:
        """Does nothing: `wait` raises gloo's errors."""

    def wait(self, work: Any, check: Callable[[], None]) -> None:
        """Blocks the host until `work` is done. After each slice it calls `check`, which raises if the rank must leave.

        Raises ConnectionError if a peer has been gone for MISSED seconds. See [Note: What gloo misses].
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
        """Shuts the group's sockets, which ends every collective here and at the peers.

        gloo's own abort frees no rank. The listener stays open, because shutting it would end the process.
        """
        for fd, inode in self._fds:
            try:
                if os.fstat(fd).st_ino != inode:
                    continue  # closed, and another file has its number now
                with socket.socket(fileno=os.dup(fd)) as s:
                    s.getpeername()
                    s.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def parted(self) -> bool:
        """Whether a peer has closed its end or died. gloo then closes the socket here, too."""
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
    """Returns the device on which gloo listens: address `here`, or on several hosts interface GLOO_SOCKET_IFNAME.

    By default gloo would use the address of the host's name, or the loopback if it cannot resolve the name.
    """
    if here != LOOPBACK and (interface := os.environ.get("GLOO_SOCKET_IFNAME")):
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=here)


def _sockets() -> set[tuple[int, int]]:
    """Returns (descriptor, inode) of this process's open sockets, without /proc. The system soon reuses descriptors."""
    found = set()
    for fd in range(3, 1024):
        try:
            about = os.fstat(fd)
            if stat.S_ISSOCK(about.st_mode):
                found.add((fd, about.st_ino))
        except OSError:
            continue
    return found
