"""A GPU. Only this file names torch.cuda's streams and events.

[Note: Order on a GPU] A call returns when its work is queued. The training thread and autograd's thread queue on the
compute stream, a lane's thread on the lane's stream. A child begins after an event of the compute stream. When a rank
waits for the child, the compute stream waits for an event of the lane's stream, and the host does not wait. So the host
runs ahead, 2 steps at most (engine/collectives/stopwatch.py), and gets times, losses and failures that much later.

[Note: Memory that crosses] torch reuses freed memory *on the stream that allocated it*, even if other streams still
read it. So the lane keeps a child's arguments until the GPU has reached its event (`held`). `wait_in_stream` marks the
child's result as used by the waiting stream.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.engine.device.chip import Chip
from workbench.rank import Bucket

FIRST_NAP, LONGEST_NAP = 50e-6, 2e-3  # seconds between 2 looks at an event, growing


class CudaChip(Chip):
    """api: torch.cuda, or a stand-in for tests"""

    runs_ahead = True

    def __init__(self, name: str, api: Any = torch.cuda) -> None:
        super().__init__(name)
        self.api = api
        self.pinned = _allocate_pinned if api is torch.cuda else api.pinned

    def bind_thread(self) -> None:
        self.api.set_device(self.name)

    def make_stream(self) -> Any:
        return self.api.Stream(device=self.name)

    def record_event(self) -> Any:
        event = self.api.Event()
        event.record()
        return event

    def record_timed_event(self) -> Any:
        event = self.api.Event(enable_timing=True)
        event.record()
        return event

    def use_stream(self, stream: Any = None, after: Any = None) -> AbstractContextManager[None]:
        return self._use_stream(stream, after)

    @contextmanager
    def _use_stream(self, stream: Any, after: Any) -> Iterator[None]:
        self.bind_thread()
        with torch.no_grad(), self.api.stream(stream):  # None keeps this thread's stream
            if after is not None:
                self.api.current_stream().wait_event(after)
            yield

    def wait_in_stream(self, event: Any, value: Any = None) -> None:
        stream = self.api.current_stream()
        stream.wait_event(event)
        for x in _find_tensors(value):
            if x.is_cuda:
                x.record_stream(stream)

    def has_reached(self, event: Any) -> bool:
        return bool(event.query())

    def block_until(self, event: Any, look: Callable[[], None]) -> None:
        nap = FIRST_NAP
        while not event.query():
            look()
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)

    def list_arguments(self, child: Any) -> list[Any]:
        given = list(inspect.getcoroutinelocals(child).values())
        return [*given, *(b.data for b in given if isinstance(b, Bucket))]

    def make_empty(self, like: Tensor, numel: int) -> Tensor:
        """Rounds up by 1/8 at most, so that sizes that vary by step can reuse freed memory."""
        grain = 1 << max(0, numel.bit_length() - 4)
        return like.new_empty(-(-numel // grain) * grain)[:numel]

    def copy_out(self, x: Tensor) -> tuple[Tensor, Any]:
        there = self.pinned(x.shape, x.dtype)
        there.copy_(x.detach(), non_blocking=True)
        return there, self.record_event()

    def copy_to_host(self, x: Tensor) -> Tensor:
        if x.device.type != torch.device(self.name).type:
            return x.detach()
        there, event = self.copy_out(x)
        event.synchronize()  # for this copy, not for the whole GPU
        return there

    def copy_from_host(self, into: Tensor, sent: Tensor) -> None:
        """torch keeps the pinned copy until the GPU has read it, so the caller may free `sent`."""
        if into.device.type != torch.device(self.name).type:
            return super().copy_from_host(into, sent)
        into.copy_(self.pinned(sent.shape, sent.dtype).copy_(sent), non_blocking=True)

    def seconds_between(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) * 1e-3

    def allocated_bytes(self) -> int:
        return int(self.api.memory_stats(self.name).get("allocated_bytes.all.current", 0))

    def peak_bytes(self) -> int:
        return int(self.api.memory_stats(self.name).get("allocated_bytes.all.peak", 0))


def _allocate_pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns memory for asynchronous copies. torch caches it."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _find_tensors(x)
