"""NCCL: collectives that the GPU runs in the order of issue. The host does not wait for them.

[Note: What NCCL does otherwise than gloo] From the source of torch's ProcessGroupNCCL.
* `work.wait()` makes the current stream wait and returns. With a time limit it blocks the host, counts from when the
  collective was *issued*, and aborts the communicator. So the engine never passes a limit.
* `is_completed()` queries an event. After an abort, work counts as completed and has no result. So the engine checks
  afterwards whether this rank was cut.
* If a peer is gone, kernels here spin until this rank aborts its own communicator from another thread.
* torch's watchdog would end the process on an error, or abort silently, after which work looks done. With
  NCCL_ENVIRONMENT it only logs. The engine looks for errors itself, and a person or its peers make a rank leave.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.device.cuda import FIRST_NAP, LONGEST_NAP

CHECK_INTERVAL = 0.1  # seconds between 2 checks for a lost peer
LOSS_GRACE_SECONDS = 1.0  # seconds that collectives may go on: the lost peer may have done its part
SHUTDOWN_TIMEOUT = 5.0  # seconds for the peers to shut down in order
# An engine outlives its runs, so torch must not end it, and a wait must not block.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
_CARRIED = (*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NcclGroup:
    """One communicator over NCCL. All ranks make it together.

    is_peer_gone: see `Wire` in engine/collectives/wire.py; made: makes (group, backend), for tests
    """

    carried: frozenset[torch.dtype] | None = frozenset(_CARRIED)

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        device: str,
        is_peer_gone: Callable[[], bool],
        made: Callable[..., tuple[Any, Any]] | None = None,
        **_: Any,
    ) -> None:
        self._is_peer_gone = is_peer_gone
        self.is_aborted = self.is_peer_lost = self.is_lent = False
        self._open: deque[Any] = deque()  # issued, not known to be done
        self._closing = threading.Event()
        self.group, self._backend = (made or _make_group)(store, rank, size, device)
        self._guard = threading.Thread(target=self._watch_peers, name=f"rank {rank} guard", daemon=True)
        self._guard.start()

    def note_issued(self, work: Any) -> Any:
        """Removes completed collectives. Raises the error of a completed one."""
        self._open.append(work)  # first: the guard must know of it, whatever an older one raises
        while self._open and self._open[0].is_completed():
            self._raise_error(self._open.popleft())
        return work

    def check_peers(self) -> None:
        if self.is_peer_lost:
            raise ConnectionError("Connection closed by peer: it is gone from the control wire")
        if self.is_aborted:
            raise ConnectionError("Connection closed by peer: the communicator was aborted")

    def wait(self, work: Any, check: Callable[[], None]) -> None:
        """The calling thread's stream waits for `work`, the host does not."""
        check()
        work.wait()

    def wait_on_host(self, work: Any, check: Callable[[], None]) -> None:
        nap = FIRST_NAP
        while not work.is_completed():
            check()
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        check()
        work.wait()

    def cut_connections(self) -> None:
        """Aborts the communicator, which frees the kernels here. The peers notice it on the control wire."""
        self.is_aborted = True
        self._run_aside(self._backend.abort, 2.0)

    def has_lost_peer(self) -> bool:
        return self.is_peer_lost

    def close(self) -> None:
        """Shuts down together with the peers, or aborts after SHUTDOWN_TIMEOUT seconds."""
        self._closing.set()
        if not self.is_aborted and not self._run_aside(self._backend.shutdown, SHUTDOWN_TIMEOUT):
            self.cut_connections()
        self._guard.join(2 * CHECK_INTERVAL)
        self._open.clear()
        self.group = self._backend = None

    def _raise_error(self, work: Any) -> None:
        if not self.is_aborted:
            work.wait()

    def _watch_peers(self) -> None:
        """On a thread of its own, because the host may be blocked in a copy from the GPU."""
        while not self._closing.wait(CHECK_INTERVAL):
            if (
                self._is_peer_gone()
                and not self._closing.wait(LOSS_GRACE_SECONDS)
                and (self.is_lent or self._has_open_work())
            ):
                self.is_peer_lost = True
                return self.cut_connections()

    def _has_open_work(self) -> bool:
        return not all(work.is_completed() for work in list(self._open))

    @staticmethod
    def _run_aside(what: Callable[[], None], patience: float) -> bool:
        """Returns whether `what` has ended on a thread within `patience` seconds."""
        thread = threading.Thread(target=what, daemon=True)
        thread.start()
        thread.join(patience)
        return not thread.is_alive()


def _make_group(store: Any, rank: int, size: int, device: str) -> tuple[Any, Any]:
    """Connects eagerly, because an unfinished communicator cannot be aborted."""
    os.environ.update(NCCL_ENVIRONMENT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # for the watchdog, which must not act
    backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(torch.device(device))
    group = dist.ProcessGroup(store, rank, size)
    name = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(name)
    group._register_backend(torch.device("cuda"), name, backend)
    return group, backend
