"""Measures the joint peak of activations and gradients during one backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, UntypedStorage
from torch.utils.hooks import RemovableHandle

from workbench.host.memory.storages import (
    Alive,
    count_bytes,
    count_look_interval,
    find_gradients,
    get_storage,
    walk_nodes,
)
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.parameter_layout import ParameterLayout

Ends = tuple[Tensor | None, ...]


class GraphHooks:
    """Hooks at the end of each node of a loss's graph.

    Nodes that accumulate a parameter's gradient get none, because autograd would then copy the gradient.
    """

    def __init__(self) -> None:
        self._removers: list[RemovableHandle] = []
        self._heard: Callable[[Ends, Ends], None] | None = None

    def hook_graphs(self, losses: Iterable[Tensor]) -> None:
        """Replaces earlier hooks."""
        while self._removers:
            self._removers.pop().remove()
        self._removers = [
            node.register_hook(self._on_node_end) for node in walk_nodes(losses) if not hasattr(node, "variable")
        ]

    @contextmanager
    def listen_to_backward(self, passing: BackwardMeter) -> Iterator[BackwardMeter]:
        try:
            with passing:
                self._heard = passing.end
                yield passing
        finally:
            self._heard = None

    def _on_node_end(self, handed: Ends, given: Ends) -> None:
        if self._heard is not None:
            self._heard(handed, given)


class BackwardMeter:
    """Looks at every node of the graph as it ends, when the gradients on both sides exist.

    A gradient between two nodes counts from the end of the first until it is freed. If buckets release gradients, they
    are recounted up to MAX_LOOKS times.

    activations: (weak reference, bytes) of tensors that the backward will free
    comes:       bytes that a Place's gradient adds when it arrives
    looks:       (arrived gradients, peak bytes of activations and of gradients between nodes)
    most:        peak bytes of activations and new gradients together
    """

    def __init__(self, layout: ParameterLayout, activations: Alive, comes: Callable[[ParameterPlace], int]) -> None:
        self._layout, self._comes = layout, comes
        self._activations = activations
        self._lies: dict[int, weakref.ref[UntypedStorage]] = {}  # storages before it
        self._counted_storages: dict[int, weakref.ref[UntypedStorage]] = {}  # storages in _now
        self._freed_bytes: list[int] = []  # freed since the last look
        self._now = self._came = 0
        self._removers: list[RemovableHandle] = []
        self.names: list[str] = []  # in gradients' order
        self.looks: list[tuple[int, int]] = []
        self.most = 0

    def __enter__(self) -> BackwardMeter:
        there = find_gradients(self._layout)
        self._lies, self._before = {where: weakref.ref(s) for where, s in there.items()}, count_bytes(there)
        del there
        for storage, _ in self._activations:
            self._watch_storage(storage())
        for place in self._layout.order:
            if not place.param.requires_grad:  # torch refuses a hook on it
                continue
            hook = place.param.register_post_accumulate_grad_hook(lambda _, place=place: self._count_gradient(place))
            self._removers.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for remover in self._removers:
            remover.remove()
        self._counted_storages.clear()

    def _watch_storage(self, storage: UntypedStorage | None) -> None:
        if storage is None or storage._cdata in self._counted_storages:
            return
        where, size = storage._cdata, storage.nbytes()
        if where in self._lies and self._lies[where]() is not None:
            return
        self._counted_storages[where] = weakref.ref(storage, partial(self._forget_storage, where, size))
        self._now += size

    def _forget_storage(self, where: int, size: int, _: object = None) -> None:
        if self._counted_storages.pop(where, None) is not None:
            self._freed_bytes.append(size)

    def end(self, handed: Ends, given: Ends) -> None:
        """given: gradients that the node received; handed: gradients that it passes on"""
        for x in (*handed, *given):
            if x is not None:
                self._watch_storage(get_storage(x))
        self._note_peak()

    def _note_peak(self) -> None:
        while self._freed_bytes:
            self._now -= self._freed_bytes.pop()
        count = len(self.names)
        if self.looks and self.looks[-1][0] == count:
            self.looks[-1] = count, max(self.looks[-1][1], self._now)
        else:
            self.looks.append((count, self._now))
        self.most = max(self.most, self._came + self._now)

    def _count_gradient(self, place: ParameterPlace) -> None:
        """A node may have returned this tensor."""
        if place.param.grad is not None and (storage := get_storage(place.param.grad)) is not None:
            self._forget_storage(storage._cdata, storage.nbytes())
        self.names.append(place.name)
        if not self._layout.gives_back:
            self._came += self._comes(place)
        elif len(self.names) % count_look_interval(self._layout) == 0:
            self._came = count_bytes(find_gradients(self._layout)) - self._before
        self._note_peak()
