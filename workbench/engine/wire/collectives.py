"""The wire: what the engine asks of torch.distributed; how gloo and NCCL do it is in engine/device.

A `Wire` is one process group used by one thread at a time (two threads on one group give silently wrong sums).
Waiting is done in slices, so that a stop or an abort is heard while a collective blocks.

[Note: One communicator per GPU] Two communicators that have kernels on one GPU at a time may each wait for the other's
on another rank. So there is one, the data wire's, and one thread at a time issues on it; control, backgrounds and
arrivals on a Link go over gloo, whatever the data goes over.

[Note: No name service] torch's TCPStore asks for the name of every address that it connects to, the loopback's too, and
where the answer is lost a run begins five seconds later. So ranks of one host meet in a file instead, in one for each
generation and each group: whoever opens torch's FileStore reads all that was ever written into its file, and keeps it.
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
    """This rank was told to leave a collective that its peers did not finish."""


def peer_left(error: BaseException, text: str) -> bool:
    """Whether `error`, which says `text`, is what a rank meets whose peer has failed or was told to leave."""
    signs = ("onnection closed by peer", "onnection reset", "ead error", "rite error", "roken pipe", "pair closure",
             "emote process exiting", "ommunicator was aborted")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in text for sign in signs)


def of_own(error: BaseException) -> bool:
    """Was it raised by code that is neither ours nor torch's? Whatever it says, then no peer's leaving is behind it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    file = Path(last.tb_frame.f_code.co_filename)
    return not (file.is_relative_to(_TORCH) or file.is_relative_to(_HERE))


class Leaving(threading.Event):
    """Set when a rank must leave at once; every wait hears it within a slice."""


def host_store(host: str = LOOPBACK) -> tuple[Any, str, int]:
    """Where all ranks of a lab meet: (what has to be kept for it to be there, host, port).

    On one host the name of a file stands for the host, and the port is 0. See [Note: No name service]. What else the
    ranks of the host share lies beside that file, in a directory that is this user's alone.
    """
    if host == LOOPBACK:
        folder = tempfile.mkdtemp(prefix="workbench-")
        kept = Leaving()  # anything that can be let go
        weakref.finalize(kept, shutil.rmtree, folder, ignore_errors=True)
        return kept, str(Path(folder) / "ranks"), 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, host, store.port


def connect_store(host: str, port: int, generation: str, timeout: float = 60.0) -> Any:
    """The meeting point as seen by one run: keys of another generation cannot be met."""
    limit = timedelta(seconds=timeout)
    if port:
        store: Any = dist.TCPStore(host, port, is_master=False, timeout=limit)
    else:
        store = dist.FileStore(meeting(host, generation), -1)
        store.set_timeout(limit)
    return dist.PrefixStore(generation, store)


def meeting(host: str, generation: str) -> str:
    """The file in which ranks of one host meet, whose name may not hold all that a generation's name does."""
    return f"{host}-{hashlib.blake2b(generation.encode(), digest_size=8).hexdigest()}"


class Wire:
    """A process group of all ranks of a run, for one thread at a time.

    here: at which of this machine's addresses gloo listens
    kind: "gloo" or "nccl"; on NCCL the tensors lie on `on`, and `beside` says whether a peer is gone. `precise` wraps a
    gloo group so that mismatched collectives raise a clean error instead of ending the process; it costs several times
    as much per small collective. See [Note: One communicator per GPU].
    """

    def __init__(self, store: Any, rank: int, size: int, tag: str, leaving: Leaving, kind: str = "gloo",
                 here: str = LOOPBACK, timeout: float = 600.0, precise: bool = False, on: str = "cpu",
                 beside: Callable[[], bool] = lambda: False) -> None:
        self.rank, self.size, self.leaving, self.tag, self.kind = rank, size, leaving, tag, kind
        self._torn = False
        self.waits, self.moved = False, time.monotonic()  # is somebody in `wait`, and since when is that so
        self.line = device.KINDS[kind](dist.PrefixStore(tag, store), rank, size, timeout=timeout, here=here,
                                       precise=precise, device=on, beside=beside)
        self.group = self.line.group
        self._issued = self.line.issued

    # -- asynchronous: each returns a Work for `wait` --

    def all_reduce(self, x: Tensor, op: str = "sum") -> Any:
        """Of a "mean" this is the sum, for gloo knows no mean: whoever waits divides."""
        if self.line.carried is not None and x.dtype not in self.line.carried:
            raise StrategyError(
                f"all_reduce of {str(x.dtype)[6:]}: {self.kind} adds no such numbers; hand in int32 or float32, or "
                f"gather them and add them here"
            )
        return self._issued(self.group.allreduce([x], _OPS[op]))

    def broadcast(self, x: Tensor, source: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._issued(self.group.broadcast([self.carriable(x)], options))

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self._issued(self.group._allgather_base(out, x))

    def all_to_all(self, out: Tensor, x: Tensor, takes: Sequence[int] = (), gives: Sequence[int] = ()) -> Any:
        """Equal rows, or as many elements as it says from and to each rank."""
        return self._issued(self.group.alltoall_base(out, x, list(takes), list(gives)))

    def lend(self) -> Any:
        """The group, for torch's own DDP, which issues on it without telling."""
        self.line.lent = True
        return self.group

    def carriable(self, x: Tensor) -> Tensor:
        """`x`, or its bytes where the dtype is not carried as it is; for what moves numbers and adds none."""
        carried = self.line.carried
        return x if carried is None or x.dtype in carried else x.view(torch.uint8)

    def check(self) -> None:
        """Raises Aborted when this rank is told to leave, and ConnectionError when a peer was seen to be gone."""
        if self.leaving.is_set():
            raise Aborted(f"left a collective on the {self.tag} wire before its peers finished it")
        self.line.look()

    def wait(self, work: Any) -> None:
        """What follows comes after `work`: the host waits (gloo), or its stream (NCCL). Raises as `check` does."""
        self.waits, self.moved = True, time.monotonic()
        self.line.wait(work, self.check)
        self.waits, self.moved = False, time.monotonic()

    def finish(self, work: Any) -> None:
        """The host waits until `work` is done. Raises as `check` does."""
        self.waits, self.moved = True, time.monotonic()
        self.line.finish(work, self.check)
        self.waits, self.moved = False, time.monotonic()

    def cut(self) -> None:
        """Ends everything that is under way here; the peers hear of it."""
        self._torn = True
        self.line.cut()

    def parted(self) -> bool:
        """Has a peer closed its end?"""
        return bool(self.line.parted())

    def close(self) -> None:
        """Gives the group back. One that was cut may miss that its sockets are gone (seen in gloo's waitSend), and
        then ends only at its time limit: it does so on a thread that nobody waits for.
        """
        last, self.group = [self.group], None
        self.line.close()
        if not self._torn:
            return last.clear()
        thread = threading.Thread(target=last.clear, name=f"rank {self.rank} giving back {self.tag}", daemon=True)
        thread.start()
        thread.join(2.0)
