"""A GPU as the engine uses it: the only file that names torch.cuda's streams and events.

[Note: Order on a GPU] A call returns when its work is queued. The training thread, and autograd's own thread, queue on
the compute stream; a lane's thread queues on the lane's. Where a child begins, an event of the compute stream stands
before it; where it is waited for, the compute stream waits for an event of the lane's, and the host does not. So the
host runs ahead, two steps at most (engine/wire/watch.py), and learns times, losses and failures that much later.

[Note: Memory that crosses] torch gives freed memory to whoever asks next *on the stream that it was made on*, however
far other streams are. What a child is given is therefore kept until the lane's event is reached (`held`), and what it
returns is noted as used by the stream that waits (`follow`).
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

FIRST_NAP, LONGEST_NAP = 50e-6, 2e-3  # seconds between two looks at an event: soon at first, then seldom


class Cuda(Chip):
    """One GPU. api: torch.cuda, or what stands for it in tests."""

    runs_ahead = True

    def __init__(self, name: str, api: Any = torch.cuda) -> None:
        super().__init__(name)
        self.api = api
        self.pinned = _pinned if api is torch.cuda else api.pinned

    def bind(self) -> None:
        self.api.set_device(self.name)

    def stream(self) -> Any:
        return self.api.Stream(device=self.name)

    def mark(self) -> Any:
        event = self.api.Event()
        event.record()
        return event

    def moment(self) -> Any:
        event = self.api.Event(enable_timing=True)
        event.record()
        return event

    def inside(self, stream: Any = None, after: Any = None) -> AbstractContextManager[None]:
        return self._inside(stream, after)

    @contextmanager
    def _inside(self, stream: Any, after: Any) -> Iterator[None]:
        self.bind()
        with torch.no_grad(), self.api.stream(stream):  # None: the stream of this thread as it is
            if after is not None:
                self.api.current_stream().wait_event(after)
            yield

    def follow(self, event: Any, value: Any = None) -> None:
        stream = self.api.current_stream()
        stream.wait_event(event)
        for x in _tensors(value):
            if x.is_cuda:
                x.record_stream(stream)

    def reached(self, event: Any) -> bool:
        return bool(event.query())

    def await_host(self, event: Any, look: Callable[[], None]) -> None:
        nap = FIRST_NAP
        while not event.query():
            look()
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)

    def held(self, child: Any) -> list[Any]:
        given = list(inspect.getcoroutinelocals(child).values())
        return [*given, *(b.data for b in given if isinstance(b, Bucket))]

    def room(self, like: Tensor, numel: int) -> Tensor:
        """Sizes that change from step to step are rounded up, by an eighth at most, so that freed memory fits again."""
        grain = 1 << max(0, numel.bit_length() - 4)
        return like.new_empty(-(-numel // grain) * grain)[:numel]

    def out(self, x: Tensor) -> tuple[Tensor, Any]:
        there = self.pinned(x.shape, x.dtype)
        there.copy_(x.detach(), non_blocking=True)
        return there, self.mark()

    def to_host(self, x: Tensor) -> Tensor:
        if x.device.type != torch.device(self.name).type:
            return x.detach()
        there, event = self.out(x)
        event.synchronize()  # this copy, and not all that the GPU has to do
        return there

    def fill(self, into: Tensor, sent: Tensor) -> None:
        """torch keeps the pinned copy until the GPU has read it; what it is a copy of may go."""
        if into.device.type != torch.device(self.name).type:
            return super().fill(into, sent)
        into.copy_(self.pinned(sent.shape, sent.dtype).copy_(sent), non_blocking=True)

    def seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) * 1e-3

    def allocated(self) -> int:
        return int(self.api.memory_stats(self.name).get("allocated_bytes.all.current", 0))

    def peak(self) -> int:
        return int(self.api.memory_stats(self.name).get("allocated_bytes.all.peak", 0))


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory of the host that a GPU copies from and to by itself; torch keeps it for the next that asks."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a child returned: one, or tuples and lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)
