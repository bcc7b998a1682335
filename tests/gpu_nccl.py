"""A stand-in for NCCL on CPUs: behaves as torch's ProcessGroupNCCL, over gloo.

* A collective is ordered behind its thread's stream and runs later, on the communicator's own stream.
  Until then its outputs hold nonsense. `wait()` orders the calling stream; an event's query says "done".
* `wait(limit)` blocks and counts from the issue. After the limit it aborts the communicator and raises.
* All ranks must issue the same calls in the same order. Two threads must not issue at once, and one GPU must
  not run two communicators. Tensors on the host, and dtypes unknown to NCCL, are refused.
* A lost peer is never noticed. `abort()` frees what waits, which then looks done.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_order import Event, Gpu, Stream, current_stream, gpu_here
from workbench.engine.device.gloo import GlooGroup

CARRIED = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
           torch.float64, torch.bool, torch.float8_e5m2, torch.float8_e4m3fn}  # fmt: skip


class Refused(AssertionError):
    """NCCL would fail, hang or give wrong sums here."""


class Work:
    """One collective in flight."""

    def __init__(self, group: Group, outs: list[Tensor], event: Event) -> None:
        self.group, self.outs, self.event = group, outs, event
        self.issued = time.monotonic()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.error is not None or self.event.query()

    def wait(self, limit: Any = None) -> bool:
        current_stream().wait_event(self.event)
        while limit is not None and not self.is_completed():
            if time.monotonic() - self.issued > limit.total_seconds():
                self.error = RuntimeError("Watchdog caught collective operation timeout: before timing out.")
                self.group.abort()
            time.sleep(1e-3)
        if self.error is not None:
            raise self.error
        return True


class Group:
    """The group and its backend. log: (verb, elements) in the order of the calls."""

    def __init__(self, store: Any, rank: int, size: int, device: str) -> None:
        self.gpu: Gpu = gpu_here()
        self.rank, self.size = rank, size
        self.gpu.communicators.append(self)
        self.stream = Stream(self.gpu, "nccl")
        self.log: list[tuple[str, int]] = []
        self.pending: list[Work] = []
        self.aborted = False
        self.gate = threading.Event()  # nothing runs while it is shut
        self.gate.set()
        self._asking = threading.Lock()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gloo = GlooGroup(store, rank, size, timeout=120.0)
        self._thread = threading.Thread(target=self._serve, name=f"rank {rank} nccl", daemon=True)
        self._thread.start()

    def allreduce(self, xs: list[Tensor], op: Any) -> Work:
        return self._ask("allreduce", xs, xs, lambda g, i, o: g.allreduce(o, op), keep=True)

    def broadcast(self, xs: list[Tensor], options: Any) -> Work:
        return self._ask("broadcast", xs, xs, lambda g, i, o: g.broadcast(o, options), keep=True)

    def _allgather_base(self, out: Tensor, x: Tensor) -> Work:
        return self._ask("allgather", [x], [out], lambda g, i, o: g._allgather_base(o[0], i[0]))

    def alltoall_base(self, out: Tensor, x: Tensor, takes: list[int], gives: list[int]) -> Work:
        return self._ask("alltoall", [x], [out], lambda g, i, o: g.alltoall_base(o[0], i[0], takes, gives))

    def abort(self) -> None:
        self.aborted = True
        self._jobs.put(None)
        self._gloo.cut_connections()  # or else the code that collects the group waits for its time limit

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _ask(self, verb: str, ins: list[Tensor], outs: list[Tensor], do: Any, keep: bool = False) -> Work:
        if not self._asking.acquire(blocking=False):
            raise Refused(f"two threads issue on one communicator: {verb}")
        try:
            with _disable_current_modes():
                time.sleep(2e-4)
                self._allowed(verb, [*ins, *outs])
                self.log.append((verb, outs[0].numel()))
                return self._queued(verb, ins, outs, do, keep)
        finally:
            self._asking.release()

    def _allowed(self, verb: str, xs: list[Tensor]) -> None:
        for x in xs:
            if self.gpu.key(x) not in self.gpu.lying:
                raise Refused(f"{verb}: Tensors must be CUDA and dense, and this one is the host's")
            if x.dtype not in CARRIED:
                raise Refused(f"{verb}: Input tensor data type is not supported for NCCL process group: {x.dtype}")
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        for other in self.gpu.communicators:
            if other is not self and any(not w.event.over() for w in other.pending):
                raise Refused("two communicators are under way on one GPU")

    def _queued(self, verb: str, ins: list[Tensor], outs: list[Tensor], do: Any, keep: bool) -> Work:
        here = current_stream()
        here.tick()
        ready, event = Event(), Event()
        ready.record(here)
        self.stream.wait_event(ready)
        self.stream.due = []
        event.record(self.stream)
        event.outside = True
        for x in ins:
            self.gpu.touch(x, self.stream, False, verb)
        for x in outs:
            self.gpu.touch(x, self.stream, True, verb)
        given = [x.clone() for x in ins]
        results = given if keep else [torch.empty_like(x) for x in outs]
        for x in outs:
            x.view(torch.uint8).fill_(0x7F)  # until the event these values are undefined
        work = Work(self, outs, event)
        self.pending = [w for w in self.pending if not w.event.over()] + [work]
        self._jobs.put((verb, work, ready, given, results, do))
        if self.aborted:  # just now; nothing will run it
            event.complete()
        return work

    def _serve(self) -> None:
        while not self.aborted and (job := self._jobs.get()) is not None:
            try:
                self._do(*job)
            except RuntimeError:
                while not self.aborted:  # a peer is lost, which NCCL does not notice
                    time.sleep(0.01)
        for work in self.pending if self.aborted else ():
            work.event.complete()  # its kernel is gone

    def _do(self, verb: str, work: Work, ready: Event, given: list[Tensor], results: list[Tensor], do: Any) -> None:
        ready.wait_for()
        while not self.gate.wait(0.01):
            self._check()
        time.sleep(self.gpu.lateness())
        label = f"{verb} {given[0].dtype} {results[0].numel() if verb != 'alltoall' else ''}".encode()
        mine = torch.tensor([int.from_bytes(hashlib.blake2b(label, digest_size=7).digest(), "big")])
        every = torch.empty(self.size, dtype=torch.int64)
        self._through(self._gloo.group._allgather_base(every, mine))
        if len(set(every.tolist())) > 1:
            work.error = Refused(f"ranks ask in another order: {verb}")
        self._through(do(self._gloo.group, given, results))
        if not self.aborted:
            for out, result in zip(work.outs, results, strict=True):
                out.copy_(result)
            work.event.complete()

    def _through(self, work: Any) -> None:
        self._gloo.wait(work, self._check)

    def _check(self) -> None:
        if self.aborted:
            raise RuntimeError("aborted")


def made(store: Any, rank: int, size: int, device: str) -> tuple[Any, Any]:
    """Makes a group and its backend, like engine/device/nccl.py."""
    group = Group(store, rank, size, device)
    return group, group
