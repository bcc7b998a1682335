"""gloo: collectives that the host runs and waits for in slices.

[Note: What gloo misses] If a peer closes just before gloo reports a rank's bytes as sent, the rank may wait for its
time limit of 10 minutes. This was seen in waitSend of torch 2.13, when peers failed after they had received the bytes.
So `wait` raises ConnectionError GONE_PEER_TIMEOUT seconds after it has noticed that a peer is gone. It does not raise
at once: the first rank that ends a run closes its group while other ranks may still exchange their last messages.

[Note: Which sockets are gloo's] A process opens other sockets at the same moment, for another lane's group or a user's
data loader. So each rank stores the address of its gloo listener. A socket is the group's if one of its ends is the
listener of a rank of the group.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.device.chip import Chip
from workbench.record.process import borrow_socket

LOOPBACK = "127.0.0.1"
WAIT_SLICE = timedelta(milliseconds=100)
GONE_PEER_TIMEOUT = 5.0  # seconds
LISTEN_STATE = "listens"
_opening = threading.Lock()  # held while a device opens its listener


class GlooGroup:
    """One process group over gloo. precise: see `Wire` in engine/collectives/wire.py"""

    carried: frozenset[torch.dtype] | None = None  # dtypes that it adds; None: gloo raises the error itself
    is_lent = False  # whether other code issues on this group, too

    def __init__(
        self, store: Any, rank: int, size: int, *, timeout: float, here: str = LOOPBACK, precise: bool = False, **_: Any
    ) -> None:
        before = set(_list_sockets())
        self.group = self._make_group(store, rank, size, here, timedelta(seconds=timeout), precise)
        self._fds = _find_group_sockets(store, rank, size, before) if size > 1 else set()

    def note_issued(self, work: Any) -> Any:
        return work

    def check_peers(self) -> None:
        """`wait` raises gloo's errors instead."""

    def wait(self, work: Any, check: Callable[[], None]) -> None:
        """Blocks the host until `work` is done. Each slice calls `check`, which raises if the rank must leave.

        Raises ConnectionError if a peer has been gone for GONE_PEER_TIMEOUT seconds. See [Note: What gloo misses].
        """
        gone: float | None = None
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
            check()
            if not self.has_lost_peer():
                continue
            gone = gone or time.monotonic()
            if time.monotonic() - gone > GONE_PEER_TIMEOUT:
                raise ConnectionError("Connection closed by peer, as its sockets show; the collective did not end")

    wait_on_host = wait

    def cut_connections(self) -> None:
        """Shuts the group's sockets, which ends every collective here and at the peers.

        gloo's own abort frees no rank. Shutting the listener would end the process.
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

    def has_lost_peer(self) -> bool:
        """Whether a peer has closed its end or died: gloo then closes the socket here, too."""
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
    def _make_group(store: Any, rank: int, size: int, here: str, limit: timedelta, precise: bool) -> Any:
        group = dist.ProcessGroup(store, rank, size)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub knows another name
        device, listener = _open_device(here)
        store.set(f"listener {rank}", listener)
        options._devices, options._timeout = [device], limit
        backend: Any = dist.ProcessGroupGloo(store, rank, size, options)
        backend._set_sequence_number_for_group()
        if precise:  # as torch's _create_process_group_wrapper, but on the same device
            checking = dist.ProcessGroupGloo(dist.PrefixStore("precise", store), rank, size, options)
            backend = dist.distributed_c10d._ProcessGroupWrapper(backend, checking)
        name = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(name)
        for device_type in Chip.list_gloo_devices():
            group._register_backend(torch.device(device_type), name, backend)
        return group


def _open_device(here: str) -> tuple[Any, str]:
    """Returns gloo's device, and the address of its listener.

    It listens at `here`, or on several hosts at the address of interface GLOO_SOCKET_IFNAME. By default gloo would use
    the address of the host's name, or the loopback if it cannot resolve the name. If another thread opens a listener at
    the same moment, this returns both addresses, one a line.
    """
    with _opening:
        before = set(_list_sockets())
        if here != LOOPBACK and (interface := os.environ.get("GLOO_SOCKET_IFNAME")):
            device = dist.ProcessGroupGloo.create_device(interface=interface)
        else:
            device = dist.ProcessGroupGloo.create_device(hostname=here)
        made = [s for s in _list_sockets().items() if s[0] not in before]
    return device, "\n".join(own for _, (own, peer) in made if peer == LISTEN_STATE)


def _find_group_sockets(store: Any, rank: int, size: int, before: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Returns the group's sockets among those opened since `before`.

    See [Note: Which sockets are gloo's]. A rank that did not see its own listener names none.
    """
    listeners = {each for other in range(size) for each in store.get(f"listener {other}").decode().splitlines()}
    return {key for key, (own, peer) in _list_sockets().items()
            if key not in before and peer != LISTEN_STATE and (own in listeners or peer in listeners)}  # fmt: skip


def _list_sockets() -> dict[tuple[int, int], tuple[str, str]]:
    """Returns {(descriptor, inode): (own address, peer's address)} of this process's TCP sockets.

    The inode is in the key because the system soon reuses descriptors. The peer is LISTEN_STATE for a listener and ""
    for a socket without a connection.
    """
    found = {}
    listed = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for fd in map(int, listed):
        try:
            about = os.fstat(fd)
            if not stat.S_ISSOCK(about.st_mode):
                continue
            with borrow_socket(fd) as s:  # without a copy of the descriptor, which another thread would find
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    found[fd, about.st_ino] = _format_address(s.getsockname()), _find_peer(s)
        except OSError:  # closed by another thread
            continue
    return found


def _find_peer(s: socket.socket) -> str:
    if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return LISTEN_STATE
    try:
        return _format_address(s.getpeername())
    except OSError:  # not connected yet, or no longer
        return ""


def _format_address(address: tuple[Any, ...]) -> str:
    return f"{address[0]} {address[1]}"
