"""What a rank's activations and gradients take together in one backward, while the first go and the others come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from workbench.host.memory.memory import Alive, every, gradients, nbytes, nodes, storage_of
from workbench.host.placement.layout import Layout, Place

Ends = tuple[Tensor | None, ...]


class Hooks:
    """At the end of each node of the graphs that it follows: told to whoever listens to a backward then.

    But not where parameters' gradients are accumulated: with a hook autograd would copy what it else takes over.
    """

    def __init__(self) -> None:
        self._removers: list[Any] = []
        self._heard: Callable[[Ends, Ends], None] | None = None

    def follow(self, losses: Iterable[Tensor]) -> None:
        """From now on, in place of those before: the graphs that these hang on, for as long as they live."""
        while self._removers:
            self._removers.pop().remove()
        self._removers = [node.register_hook(self._end) for node in nodes(losses) if not hasattr(node, "variable")]

    @contextmanager
    def heard(self, passing: Passing) -> Iterator[Passing]:
        """Within it a backward runs, to which `passing` listens."""
        try:
            with passing:
                self._heard = passing.end
                yield passing
        finally:
            self._heard = None

    def _end(self, handed: Ends, given: Ends) -> None:
        if self._heard is not None:
            self._heard(handed, given)


class Passing:
    """Every node of the graph is looked at as it ends, when what it was given and what it hands on are both there.

    activations:  (weak reference, bytes) of what the backward will free
    comes:        bytes that the gradient of a Place takes when it comes, beyond what is there before the backward
    looks:        (gradients that have come, most bytes of activations and of gradients between nodes then)
    most:         bytes that came and are there besides, together, at the worst moment

    A gradient between two nodes counts from the end of the first for as long as anybody has it. Parameters' own are
    what `comes` says once they have come. Where buckets give their memory back during the backward, what gradients
    take is counted anew up to LOOKS times.
    """

    def __init__(self, layout: Layout, activations: Alive, comes: Callable[[Place], int]) -> None:
        self._layout, self._comes = layout, comes
        self._activations, self._lies = activations, dict[int, Any]()  # what is there before
        self._there: dict[int, Any] = {}  # what is counted in _now, weakly, by where it lies
        self._gone: list[int] = []  # bytes that were let go since the last look, by whichever thread
        self._now = self._came = 0
        self._removers: list[Any] = []
        self.names: list[str] = []  # whose gradients came, in this order
        self.looks: list[tuple[int, int]] = []
        self.most = 0

    def __enter__(self) -> Passing:
        there = gradients(self._layout)
        self._lies, self._before = {where: weakref.ref(s) for where, s in there.items()}, nbytes(there)
        del there
        for storage, _ in self._activations:
            self._watch(storage())
        for place in self._layout.order:
            if not place.param.requires_grad:  # frozen meanwhile; torch refuses a hook on it
                continue
            hook = place.param.register_post_accumulate_grad_hook(lambda _, place=place: self._take(place))
            self._removers.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for remover in self._removers:
            remover.remove()
        self._there.clear()

    def _watch(self, storage: Any) -> None:
        """It counts until it is let go."""
        if storage is None or storage._cdata in self._there:
            return
        where, size = storage._cdata, storage.nbytes()
        if where in self._lies and self._lies[where]() is not None:
            return
        self._there[where] = weakref.ref(storage, partial(self._let_go, where, size))
        self._now += size

    def _let_go(self, where: int, size: int, _: object = None) -> None:
        if self._there.pop(where, None) is not None:
            self._gone.append(size)

    def end(self, handed: Ends, given: Ends) -> None:
        """A node has ended; which was given these gradients, and hands those on."""
        for x in (*handed, *given):
            if x is not None:
                self._watch(storage_of(x))
        self._look()

    def _look(self) -> None:
        while self._gone:
            self._now -= self._gone.pop()
        count = len(self.names)
        if self.looks and self.looks[-1][0] == count:
            self.looks[-1] = count, max(self.looks[-1][1], self._now)
        else:
            self.looks.append((count, self._now))
        self.most = max(self.most, self._came + self._now)

    def _take(self, place: Place) -> None:
        """A parameter's gradient has come; it may be the very tensor that a node handed on."""
        if place.param.grad is not None and (storage := storage_of(place.param.grad)) is not None:
            self._let_go(storage._cdata, storage.nbytes())
        self.names.append(place.name)
        if not self._layout.gives_back:
            self._came += self._comes(place)
        elif len(self.names) % every(self._layout) == 0:
            self._came = nbytes(gradients(self._layout)) - self._before
        self._look()
