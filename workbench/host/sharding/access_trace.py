"""The order in which a pass reads parameters, and in which their gradients arrive.

A strategy that shards parameters then knows the next bucket, and each last use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.host.memory.storages import pack_tensor
from workbench.host.placement import unmaterialized
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.settings import Json

Names = tuple[str, ...]
Packed = Tensor | tuple[Tensor, str]  # a tensor, or a view with its parameter
EVENT_KINDS = {"read", "grad"}  # events in a backward


class AccessTrace(NamedTuple):
    """How a forward and a backward used the parameters, by name.

    forward:  the parameters that each call read, in order
    backward: in order, ("read", names) before a read, and ("grad", (name,)) after a gradient
    """

    forward: tuple[Names, ...]
    backward: tuple[tuple[str, Names], ...]

    @property
    def gradient_order(self) -> list[str]:
        return [name for kind, names in self.backward for name in names if kind == "grad"]

    def to_json(self) -> Json:
        """Makes a manifest's JSON."""
        return [[list(names) for names in self.forward], [[kind, list(names)] for kind, names in self.backward]]

    @classmethod
    def from_json(cls, said: Any) -> AccessTrace:
        """Raises ValueError for other JSON."""
        try:
            forward, backward = said
            found = cls(tuple(map(tuple, forward)), tuple((kind, tuple(names)) for kind, names in backward))
        except TypeError:
            raise ValueError("its order of reading parameters is damaged") from None
        if (
            not all(isinstance(name, str) for name in found.names())
            or {kind for kind, _ in found.backward} - EVENT_KINDS
        ):
            raise ValueError("its order of reading parameters is damaged")
        return found

    def names(self) -> list[str]:
        """Lists every mention."""
        return [name for names in (*self.forward, *(names for _, names in self.backward)) for name in names]


class PassEvent(NamedTuple):
    """An event in a pass.

    share: the share of compute before the event
    kind:  "read", before buckets are first read; "full", when a bucket's gradients have arrived
    over:  buckets not read again
    """

    share: float
    kind: str
    buckets: tuple[int, ...]
    over: tuple[int, ...] = ()


def assume_trace(names: Iterable[str]) -> AccessTrace:
    """Assumes a stack of layers."""
    forward = tuple((name,) for name in names)
    return AccessTrace(forward, tuple((kind, one) for one in reversed(forward) for kind in ("read", "grad")))


class TraceListener:
    """Listens to a whole model's forward and backward."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self._named = named
        self._names = {id(p): name for name, p in named.items()}
        lies: dict[int, list[tuple[int, str]]] = defaultdict(list)  # offsets by storage
        for name, p in named.items():
            lies[p.untyped_storage()._cdata].append((int(p.storage_offset()), name))
        self._lies = {where: sorted(begins) for where, begins in lies.items()}
        self._forward: list[Names] = []
        self._backward: list[tuple[str, Names]] = []
        self._turned = False  # a backward began

    @property
    def heard_trace(self) -> AccessTrace | None:
        return AccessTrace(tuple(self._forward), tuple(self._backward)) if self._turned else None

    @contextmanager
    def listen_to_forward(self) -> Iterator[None]:
        with self._intercept_reads(), torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, self._unpack_tensor):
            yield

    @contextmanager
    def listen_to_backward(self) -> Iterator[None]:
        self._turned = True
        hooks = [p.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
                 for name, p in self._named.items() if p.requires_grad]  # fmt: skip
        try:
            with self._intercept_reads():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _intercept_reads(self) -> Iterator[None]:
        for p in self._named.values():
            unmaterialized.make_absent(p, self._note_parameters)
        try:
            yield
        finally:
            for p in self._named.values():
                unmaterialized.make_present(p)

    def _note_gradient(self, name: str, _: Tensor) -> None:
        self._backward.append(("grad", (name,)))

    def _note_parameters(self, params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        self._note_read(tuple(self._names[id(p)] for p in params))

    def _note_read(self, names: Names) -> None:
        if self._turned:
            self._backward.append(("read", names))
        elif not self._forward or self._forward[-1] != names:
            self._forward.append(names)

    def _pack_tensor(self, x: Tensor) -> Packed:
        begins = self._lies.get(x.untyped_storage()._cdata) if x.layout == torch.strided else None
        if begins is None:
            return pack_tensor(x)
        return pack_tensor(x), begins[max(0, bisect_right(begins, (x.storage_offset(), "\uffff")) - 1)][1]

    def _unpack_tensor(self, packed: Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        x, name = packed
        self._note_read((name,))
        return x


def list_forward_events(layout: ParameterLayout, trial: AccessTrace) -> list[PassEvent]:
    """Returns first reads of buckets, and which are over."""
    bucket, numel = _map_places(layout)
    last = {bucket[name]: at for at, names in enumerate(trial.forward) for name in names}
    found: list[PassEvent] = []
    known, read, done, over = set[str](), set[int](), 0, set[int]()
    for at, names in enumerate(trial.forward):
        first = tuple(dict.fromkeys(bucket[name] for name in names if bucket[name] not in read))
        if first:
            ended = tuple(i for i in sorted(read - over) if last[i] < at)
            found.append(PassEvent(done / layout.element_count, "read", first, ended))
            read |= set(first)
            over |= set(ended)
        done += sum(numel[name] for name in set(names) - known)
        known |= set(names)
    return found


def list_backward_events(layout: ParameterLayout, trial: AccessTrace) -> list[PassEvent]:
    """Returns first reads of buckets, and when gradients arrive, by index."""
    bucket, numel = _map_places(layout)
    left = [len(b.parts) for b in layout.buckets]
    found: list[PassEvent] = []
    read, done, told = set[int](), 0, 0

    def tell() -> None:
        nonlocal told
        while told < len(left) and not left[told]:
            found.append(PassEvent(done / layout.element_count, "full", (told,)))
            told += 1

    for kind, names in trial.backward:
        if kind == "read":
            first = tuple(dict.fromkeys(bucket[name] for name in names if bucket[name] not in read))
            if first := tuple(i for i in first if i >= told):
                found.append(PassEvent(done / layout.element_count, "read", first))
                read |= set(first)
        else:
            for name in names:
                done += numel[name]
                left[bucket[name]] -= 1
            tell()
    left, done = [0] * len(left), layout.element_count  # no gradient
    tell()
    return found


def _map_places(layout: ParameterLayout) -> tuple[dict[str, int], dict[str, int]]:
    return {p.name: p.bucket for p in layout.order}, {p.name: p.numel for p in layout.order}
