"""The engine's interface to torch.distributed. Its gloo and NCCL parts are in engine/device.

A `Wire` waits in slices, so that a stop or an abort can interrupt a collective that blocks.

[Note: One communicator per GPU] If two communicators have kernels on one GPU, each may wait for the kernel of the other
on another rank. So a GPU has one communicator, the data wire's, and one thread at a time issues on it. Control,
background traffic and arrivals on a Link always use gloo.

[Note: No name service] torch's TCPStore resolves the name of every address, even the loopback's. If the answer is lost,
a run begins 5 seconds later. So ranks of one host meet in a file. Each generation and each group has its own, because
opening torch's FileStore reads and keeps everything ever written into its file.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engine import device
from workbench.engine.device.gloo import LOOPBACK
from workbench.rank import StrategyError

_TORCH, _HERE = Path(torch.__file__).parent, Path(__file__).parents[2]
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Aborted(RuntimeError):
    """This rank had to leave a collective before its peers finished it."""


def is_peer_loss(error: BaseException, text: str) -> bool:
    """Whether `error` means that a peer has failed or left. text: its message"""
    signs = (
        "onnection closed by peer",
        "onnection reset",
        "ead error",
        "rite error",
        "roken pipe",
        "pair closure",
        "emote process exiting",
        "ommunicator was aborted",
    )
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in text for sign in signs)


def is_own_error(error: BaseException) -> bool:
    """Whether code outside this package and torch raised `error`. Then no lost peer is its cause."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    file = Path(last.tb_frame.f_code.co_filename)
    return not (file.is_relative_to(_TORCH) or file.is_relative_to(_HERE))


class LeaveEvent(threading.Event):
    """Makes a rank leave. Every wait checks it once per slice."""


def host_store(host: str = LOOPBACK) -> tuple[Any, str, int]:
    """Returns (what keeps the ranks' meeting point alive, host, port).

    On one host, `host` is a file's path and the port is 0. See [Note: No name service]. The ranks put other shared
    files into the same directory, which only this user can enter.
    """
    if host == LOOPBACK:
        folder = tempfile.mkdtemp(prefix="workbench-")
        kept = LeaveEvent()  # any object with a finalizer will do
        weakref.finalize(kept, shutil.rmtree, folder, ignore_errors=True)
        return kept, str(Path(folder) / "ranks"), 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, host, store.port


def connect_store(host: str, port: int, name: str, timeout: float = 60.0) -> Any:
    """Returns a store that shows only the keys under `name`, such as a generation's."""
    limit = timedelta(seconds=timeout)
    if port:
        store: Any = dist.TCPStore(host, port, is_master=False, timeout=limit)
    else:
        store = dist.FileStore(make_meeting_path(host, name), -1)
        store.set_timeout(limit)
    return dist.PrefixStore(name, store)


def make_meeting_path(host: str, name: str) -> str:
    """The name has a digest, because `name` may not fit a file name."""
    return f"{host}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


class Wire:
    """A process group, for one thread at a time: two threads on one group give silently wrong sums.

    kind: "gloo" or "nccl". See [Note: One communicator per GPU].
    here: this machine's address, at which gloo listens
    precise: wraps a gloo group so that mismatched collectives raise an error instead of ending the process. A small
             collective then takes several times as long.
    on: the device of NCCL's tensors
    is_peer_gone: whether a peer is gone, which NCCL does not notice
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        tag: str,
        leaving: LeaveEvent,
        kind: str = "gloo",
        here: str = LOOPBACK,
        timeout: float = 600.0,
        precise: bool = False,
        on: str = "cpu",
        is_peer_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.size, self.leaving, self.tag, self.kind = rank, size, leaving, tag, kind
        self._is_cut = False
        self.is_waiting, self.moved_at = False, time.monotonic()  # whether a thread is in `wait`, and since when
        self.backend = device.KINDS[kind](
            dist.PrefixStore(tag, store),
            rank,
            size,
            timeout=timeout,
            here=here,
            precise=precise,
            device=on,
            is_peer_gone=is_peer_gone,
        )
        self.group = self.backend.group
        self._issued = self.backend.note_issued

    # -- asynchronous: each returns a Work for `wait` --

    def all_reduce(self, x: Tensor, op: str = "sum") -> Any:
        """A "mean" is only summed, because gloo has no mean: the caller divides."""
        if self.backend.carried is not None and x.dtype not in self.backend.carried:
            raise StrategyError(
                f"all_reduce of {str(x.dtype)[6:]}: {self.kind} cannot sum this type; pass int32 or float32, or "
                f"gather the tensors and add them on each rank"
            )
        return self._issued(self.group.allreduce([x], _OPS[op]))

    def broadcast(self, x: Tensor, source: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._issued(self.group.broadcast([self.to_carriable(x)], options))

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self._issued(self.group._allgather_base(out, x))

    def all_to_all(self, out: Tensor, x: Tensor, takes: Sequence[int] = (), gives: Sequence[int] = ()) -> Any:
        """Exchanges equal rows, or `takes[r]` elements from each rank r and `gives[r]` to it."""
        return self._issued(self.group.alltoall_base(out, x, list(takes), list(gives)))

    def lend_group(self) -> Any:
        """For torch's own DDP, which issues collectives on it without calling this wire."""
        self.backend.is_lent = True
        return self.group

    def to_carriable(self, x: Tensor) -> Tensor:
        """Returns `x`, or its bytes if the group cannot carry its dtype. Only for collectives that do not add."""
        carried = self.backend.carried
        return x if carried is None or x.dtype in carried else x.view(torch.uint8)

    def check_peers(self) -> None:
        """Raises Aborted if this rank must leave, and ConnectionError if a peer is gone."""
        if self.leaving.is_set():
            raise Aborted(f"left a collective on the {self.tag} wire before its peers finished it")
        self.backend.check_peers()

    def wait(self, work: Any) -> None:
        """Makes the host (gloo) or its stream (NCCL) wait for `work`. Raises as `check_peers` does."""
        self._wait_with(self.backend.wait, work)

    def wait_on_host(self, work: Any) -> None:
        """Blocks the host, and raises as `check_peers` does."""
        self._wait_with(self.backend.wait_on_host, work)

    def _wait_with(self, wait: Callable[..., None], work: Any) -> None:
        self.is_waiting, self.moved_at = True, time.monotonic()
        try:
            wait(work, self.check_peers)
        finally:
            self.is_waiting, self.moved_at = False, time.monotonic()

    def cut_connections(self) -> None:
        """The peers notice it."""
        self._is_cut = True
        self.backend.cut_connections()

    def has_lost_peer(self) -> bool:
        return bool(self.backend.has_lost_peer())

    def close(self) -> None:
        """Releases the group. After `cut_connections` a thread does so, and the caller waits 2 seconds at most.

        A group that was cut may miss that its sockets are gone (seen in gloo's waitSend), and end at its time limit.
        """
        last, self.group = [self.group], None
        self.backend.close()
        if not self._is_cut:
            return last.clear()
        thread = threading.Thread(target=last.clear, name=f"rank {self.rank} giving back {self.tag}", daemon=True)
        thread.start()
        thread.join(2.0)
