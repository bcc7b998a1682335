"""A stand-in for torch.cuda on CPUs: checks that work on streams is ordered.

Work runs at once, as on any CPU. The stand-in checks whether anything *ordered* it. Every stream has a vector clock. An
event copies it, and a stream that waits for the event takes the copy over. The mode looks at every operation of torch.
An operation that touches memory which another stream wrote must have waited for that write. Otherwise it raises
OutOfOrder, although the numbers are right here. Events complete late, by a seed, so events of different streams come
out of order.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

LATE = 0.004  # seconds that an event may be late
_HERE = threading.local()  # .order: the mode of this thread; .stream: its stream


class OutOfOrder(AssertionError):
    """An operation was not ordered behind one that it depends on."""


class Stream:
    """A queue that keeps its order. clock: for each stream, how far this one has waited for it."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.clock: dict[int, int] = {}
        self.last: Event | None = None
        self.due: list[Event] = []  # events to wait for that are not yet complete

    def tick(self) -> int:
        """Counts one more operation here, ordered behind everything that the host knows to be complete."""
        _merge(self.clock, self.gpu.known)
        self.clock[id(self)] = self.clock.get(id(self), 0) + 1
        return self.clock[id(self)]

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)
        self.due.append(event)

    def arrive(self) -> None:
        """Begins the next operation. Blocks until all its events are complete, because it runs at once."""
        for event in self.due:
            event.wait_for()
        self.due = []


class Event:
    """Completes some time after the earlier work of its stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.clock: dict[int, int] = {}
        self.before: list[Event] = []
        self.at: float | None = None  # when it completed
        self._due = 0.0
        self._done = threading.Event()
        self.outside = False  # whether other code says when it is complete

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.gpu = stream.gpu
        stream.tick()
        self.clock = dict(stream.clock)
        self.before = [*stream.due, *([stream.last] if stream.last else [])]
        self._due = time.perf_counter() + self.gpu.lateness()
        stream.last = self

    def complete(self) -> None:
        self.at = time.perf_counter()
        self._done.set()

    def over(self) -> bool:
        if self.at is None and not self.outside and all(e.over() for e in self.before):
            if time.perf_counter() < self._due:
                return False
            self.at, self.before = max([self._due, *(e.at for e in self.before)]), []
        return self.at is not None

    def query(self) -> bool:
        if self.over():
            _merge(self.gpu.known, self.clock)
        return self.at is not None

    def wait_for(self) -> None:
        until = time.monotonic() + 30
        while not self.over():
            if time.monotonic() > until:
                raise OutOfOrder("an event that is waited for is never complete")
            time.sleep(2e-4)

    def synchronize(self) -> None:
        self.wait_for()
        self.query()

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed) or self.at is None or end.at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.at - self.at) * 1e3


class Touch(NamedTuple):
    """A stream reads or writes bytes [first, last) of a storage; time: on the stream's clock."""

    first: int
    last: int
    stream: Stream
    time: int
    write: bool

    def against(self, other: Touch) -> bool:
        """Returns whether one of the two must wait for the other."""
        meet = self.first < other.last and other.first < self.last
        return meet and (self.write or other.write) and self.stream is not other.stream

    def replaces(self, other: Touch) -> bool:
        """Returns whether waiting for this touch includes waiting for `other`."""
        inside = self.first <= other.first and other.last <= self.last
        return inside and (self.write or (self.stream is other.stream and not other.write))


class Gpu:
    """One GPU: `api` of engine/device/cuda.py. syncs: full waits of the host; items: waits for one number."""

    Event = Event

    def __init__(self, seed: int = 0) -> None:
        self.known: dict[int, int] = {}  # how far the host knows each stream to be
        self.compute = Stream(self, "compute")
        self.rng, self.streams = random.Random(seed), [self.compute]
        self.syncs = self.items = 0
        self.communicators: list[Any] = []
        self.seen: dict[int, StorageWeakRef] = {}  # known storages, freed or not
        self.lying: set[int] = set()  # storages in this GPU's memory
        self.copies: dict[int, tuple[Stream, int]] = {}  # copies into the host's memory, by storage
        self.touched: dict[int, list[Touch]] = {}  # by storage: which stream touched which bytes, and when

    def lateness(self) -> float:
        return self.rng.random() * LATE

    def set_device(self, name: str) -> None:
        if getattr(_HERE, "order", None) is None:
            _HERE.order = _Order(self)
            _HERE.order.__enter__()
            _HERE.stream = self.compute

    def Stream(self, device: str = "") -> Stream:
        self.streams.append(Stream(self, f"lane {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return current_stream()

    def synchronize(self) -> None:
        self.syncs += 1

    def memory_stats(self, device: str) -> dict[str, int]:
        return {}

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        was = _HERE.stream
        _HERE.stream = stream or was
        try:
            yield
        finally:
            _HERE.stream = was

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            there = torch.empty(shape, dtype=dtype)
            self.born(there, here=False)
            return there

    def key(self, x: Tensor) -> int:
        """Returns a storage's unique key: while a weak reference exists, no other storage gets its address."""
        storage = x.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = StorageWeakRef(storage)
        return storage._cdata

    def touch(self, x: Tensor, stream: Stream, write: bool, what: str) -> None:
        """Records that `stream` touches `x`; raises OutOfOrder if it did not wait for an earlier touch."""
        first, last = _bytes(x)
        mine = Touch(first, last, stream, stream.clock[id(stream)], write)
        before = self.touched.setdefault(self.key(x), [])
        for other in before:
            if other.against(mine) and stream.clock.get(id(other.stream), 0) < other.time:
                verb = "writes" if write else "reads"
                raise OutOfOrder(f"{what} on {stream.name} {verb} {tuple(x.shape)}, and did not wait for "
                                 f"{other.stream.name}")  # fmt: skip
        before[:] = [other for other in before if not mine.replaces(other)] + [mine]

    def born(self, x: Tensor, here: bool) -> None:
        """Notes new memory. here: on the GPU, not on the host"""
        (self.lying.add if here else self.lying.discard)(self.key(x))


@cache
def look_up() -> None:
    """Has torch find its operations now: two threads that first meet one at a time free what the other keeps."""
    import torch._dynamo

    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        if space in ("aten", "c10d"):
            getattr(getattr(getattr(torch.ops, space), op), overload or "default")


def current_stream() -> Stream:
    return _HERE.stream


def gpu_here() -> Gpu:
    """Returns the GPU of the calling thread."""
    return _HERE.order.gpu


class _Order(TorchDispatchMode):
    """Looks at every operation of one thread."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return func(*args, **kwargs)
        stream = current_stream()
        stream.arrive()
        stream.tick()
        out = func(*args, **kwargs)
        with _disable_current_modes():
            self._look(func, args, kwargs, out, stream)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, out: Any, stream: Stream) -> None:
        schema, gpu, seen = func._schema, self.gpu, {}
        view = bool(schema.returns) and all(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        named = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        for argument in schema.arguments:
            write = bool(argument.alias_info and argument.alias_info.is_write)
            for x in tree_leaves(named.get(argument.name)):
                if isinstance(x, Tensor):
                    seen[gpu.key(x)] = x
                    if not view and x.numel():
                        gpu.touch(x, stream, write, func.name())
        here = kwargs.get("device") is not None or any(key in gpu.lying for key in seen)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and gpu.key(x) not in seen:
                gpu.born(x, here)
                if x.numel() and "empty" not in func.name():
                    gpu.touch(x, stream, True, func.name())
        self._host(func, named, stream)

    def _host(self, func: Any, named: dict[str, Any], stream: Stream) -> None:
        """Records what the host waits for, and checks what it reads without a wait."""
        gpu = self.gpu
        out = func is torch.ops.aten.copy_.default and gpu.key(named["src"]) in gpu.lying
        if out and gpu.key(named["self"]) not in gpu.lying:
            gpu.copies[gpu.key(named["self"])] = (stream, stream.clock[id(stream)])
            if not named.get("non_blocking"):
                gpu.items += 1
                _merge(gpu.known, stream.clock)
        if func is not torch.ops.aten._local_scalar_dense.default:
            return
        if (key := gpu.key(named["self"])) in gpu.lying:
            gpu.items += 1
            _merge(gpu.known, stream.clock)
        elif key in gpu.copies:
            copier, then = gpu.copies[key]
            if gpu.known.get(id(copier), 0) < then:
                raise OutOfOrder("the host reads a number whose copy may not be there yet")


def _bytes(x: Tensor) -> tuple[int, int]:
    """Returns the range of bytes in its storage that holds `x`."""
    first = x.storage_offset() * x.element_size()
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return first, first + (reach + 1) * x.element_size()


def _merge(into: dict[int, int], other: dict[int, int]) -> None:
    for stream, time_ in other.items():
        if into.get(stream, 0) < time_:
            into[stream] = time_
