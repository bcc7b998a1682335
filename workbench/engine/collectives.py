"""The wire: the only file that talks to torch.distributed.

A `Wire` is one process group used by one thread at a time (two threads on one group give silently wrong sums).
Waiting is done in slices, so that a stop or an abort is heard while a collective blocks.

[Note: No name service] torch's TCPStore asks for the name of every address that it connects to, the loopback's too, and
where the answer is lost a run begins five seconds later. So ranks of one host meet in a file instead.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK = "127.0.0.1"
SLICE = timedelta(milliseconds=100)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Aborted(RuntimeError):
    """This rank was told to leave a collective that its peers did not finish."""


def peer_left(error: BaseException) -> bool:
    """Whether `error` is what a rank meets whose peer has failed or was told to leave."""
    signs = ("onnection closed by peer", "onnection reset", "ead error", "rite error", "roken pipe", "pair closure")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in str(error) for sign in signs)


class Leaving(threading.Event):
    """Set when a rank must leave at once; every wait hears it within a slice."""


def host_store(host: str = LOOPBACK) -> tuple[Any, str, int]:
    """Where all ranks of a lab meet: (what has to be kept for it to be there, host, port).

    On one host the name of a file stands for the host, and the port is 0. See [Note: No name service].
    """
    if host == LOOPBACK:
        fd, name = tempfile.mkstemp(prefix="workbench-", suffix=".ranks")
        os.close(fd)
        kept = Leaving()  # anything that can be let go
        weakref.finalize(kept, Path(name).unlink, missing_ok=True)
        return kept, name, 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, host, store.port


def connect_store(host: str, port: int, generation: str, timeout: float = 60.0) -> Any:
    """The meeting point as seen by one run: keys of another generation cannot be met."""
    limit = timedelta(seconds=timeout)
    if port:
        store: Any = dist.TCPStore(host, port, is_master=False, timeout=limit)
    else:
        store = dist.FileStore(host, -1)
        store.set_timeout(limit)
    return dist.PrefixStore(generation, store)


class Wire:
    """A process group of all ranks of a run, for one thread at a time.

    kind: "gloo" or "nccl". `precise` wraps the group so that mismatched collectives raise a clean error
    instead of ending the process; it costs several times as much per small collective.
    """

    def __init__(self, store: Any, rank: int, size: int, tag: str, leaving: Leaving, kind: str = "gloo",
                 loopback: bool = True, timeout: float = 600.0, precise: bool = False) -> None:
        self.rank, self.size, self.leaving, self.tag = rank, size, leaving, tag
        self._torn = False
        before = _sockets()
        self.group = _group(dist.PrefixStore(tag, store), rank, size, kind, loopback, timeout, precise)
        self._fds = _sockets() - before if size > 1 else set()

    # -- asynchronous: each returns a Work for `wait` --

    def all_reduce(self, x: Tensor, op: str = "sum") -> Any:
        return self.group.allreduce([x], _OPS[op])

    def broadcast(self, x: Tensor, source: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self.group.broadcast([x], options)

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self.group._allgather_base(out, x)

    def all_to_all(self, out: Tensor, x: Tensor, takes: Sequence[int] = (), gives: Sequence[int] = ()) -> Any:
        """Equal rows, or as many elements as it says from and to each rank."""
        return self.group.alltoall_base(out, x, list(takes), list(gives))

    def send(self, x: Tensor, to: int, tag: int) -> Any:
        return self.group.send([x], to, tag)

    def recv(self, x: Tensor, source: int | None, tag: int) -> Any:
        return self.group.recv_anysource([x], tag) if source is None else self.group.recv([x], source, tag)

    def wait(self, work: Any) -> None:
        """Blocks until `work` is done, or raises Aborted when this rank is told to leave."""
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
            if self.leaving.is_set():
                raise Aborted(f"left a collective on the {self.tag} wire before its peers finished it")

    def cut(self) -> None:
        """Ends everything that is under way here and at the peers, by shutting the group's sockets.

        gloo's own abort frees nobody. Only connected sockets are shut: shutting the listener ends the process.
        """
        self._torn = True
        for fd, inode in self._fds:
            try:
                if os.fstat(fd).st_ino != inode:
                    continue  # closed, and its number is another's by now
                with socket.socket(fileno=os.dup(fd)) as s:
                    s.getpeername()
                    s.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        """Gives the group back. One that was cut may miss that its sockets are gone (seen in gloo's waitSend), and
        then ends only at its time limit: it does so on a thread that nobody waits for.
        """
        last, self.group = [self.group], None
        self._fds = set()
        if not self._torn:
            return last.clear()
        thread = threading.Thread(target=last.clear, name=f"rank {self.rank} giving back {self.tag}", daemon=True)
        thread.start()
        thread.join(2.0)


def _group(store: Any, rank: int, size: int, kind: str, loopback: bool, timeout: float, precise: bool) -> Any:
    limit = timedelta(seconds=timeout)
    group = dist.ProcessGroup(store, rank, size)
    if kind == "nccl":
        backend: Any = dist.ProcessGroupNCCL(store, rank, size, limit)
        name, devices = dist.ProcessGroup.BackendType.NCCL, ["cuda"]
    else:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [_device(loopback)]
        options._timeout = limit
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        name, devices = dist.ProcessGroup.BackendType.GLOO, ["cpu"] + ["cuda"] * torch.cuda.is_available()
    backend._set_sequence_number_for_group()
    if precise and kind == "gloo":
        backend = dist.distributed_c10d._create_process_group_wrapper(
            wrapped_pg=backend, store_prefix=f"precise{id(group)}" if size == 1 else "precise",
            store=store, rank=rank, world_size=size, timeout=limit,
        )
    group._set_default_backend(name)
    for device_type in devices:
        group._register_backend(torch.device(device_type), name, backend)
    return group


def _device(loopback: bool) -> Any:
    """Where gloo listens: the loopback, the interface that GLOO_SOCKET_IFNAME names, or that of the host's name."""
    if loopback:
        return dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


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
