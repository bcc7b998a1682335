"""The versions of a stage's weights that its passes read: current weights, or older copies.

Autograd keeps a reference to a version in place of the weights. So a version is copied only if a pass will still read
it when the weights change. A pass that reads a copy runs while the parameters' data points into the copy. Code that
writes to the weights at the same time writes to their usual memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.host.memory.memory import packed
from workbench.host.placement.layout import Layout, Place
from workbench.rank import Part, StrategyError


class Version:
    """The weights between two updates.

    kept: a copy by bucket, once the weights may have changed; None: the current weights are this version
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.kept: list[Tensor] | None = None
        self._cut: list[tuple[list[Place], tuple[Part, ...]]] = []  # by bucket, parameters' places in the copy

    def keep(self) -> None:
        """Copies the weights, because they or the buckets may change now."""
        if self.kept is not None:
            return
        self.kept = [weights.clone() for weights in self.layout.weights]
        self._cut = [(group, self.layout.lies(index).parts) for index, group in enumerate(self.layout.groups)]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Lets a forward and its backward read this version."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), self.backward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Encloses such a backward: points the parameters' data into the copy, if there is one."""
        there = [(place.param, place.param.data) for group, _ in self._cut for place in group]
        for (group, parts), copy in zip(self._cut, self.kept or (), strict=True):
            for place, part in zip(group, parts, strict=True):
                place.param.data = copy[part.start : part.stop].view(part.shape)
        try:
            yield
        finally:
            for param, data in there:
                param.data = data

    def _pack(self, x: Tensor) -> Any:
        """Returns the object that autograd keeps in place of `x`."""
        if x.layout != torch.strided or x.is_inference():
            return x
        place = x.untyped_storage()._cdata
        if self.kept is not None:  # no code writes into a copy, though version counters of its views suggest it
            return x if any(place == copy.untyped_storage()._cdata for copy in self.kept) else _other(x)
        index = self.layout.lying.get(place)
        if index is None:
            return _other(x)
        return _Weights(self, index, x) if x.dtype == self.layout.weights[index].dtype else x.clone()


class _Other(NamedTuple):
    """A saved tensor that is no weight, with its version counter."""

    x: Tensor
    version: int

    def read(self) -> Tensor:
        """Returns the tensor. Raises StrategyError if it was changed in place after its forward.

        torch checks only tensors that it saves without hooks.
        """
        if self.x._version != self.version:
            raise StrategyError(
                f"backward reads a tensor of {list(self.x.shape)} that was changed in place after its forward: where "
                f"several micro-batches are in flight the next one's forward does that; let the model make a new tensor"
            )
        return self.x


def _other(x: Tensor) -> _Other:
    return _Other(packed(x), x._version)


class _Weights:
    """A view into the weights of a version."""

    def __init__(self, version: Version, index: int, x: Tensor) -> None:
        self.version, self.index = version, index
        begin = version.layout.weights[index].storage_offset()
        self.at = x.size(), x.stride(), x.storage_offset() - begin

    def read(self) -> Tensor:
        version = self.version
        own = version.layout.weights if version.kept is None else version.kept
        size, stride, begin = self.at
        return own[self.index].as_strided(size, stride, own[self.index].storage_offset() + begin)


def _unpack(kept: Any) -> Tensor:
    return kept.read() if isinstance(kept, (_Weights, _Other)) else kept


class Versions:
    """The versions of one stage's weights that passes will still read.

    reads: by number of a micro-batch in flight, the version that its forward reads
    """

    def __init__(self, layout: Callable[[], Layout]) -> None:
        self._layout = layout
        self._now: Version | None = None
        self._own: Version | None = None  # of the current batch, if a whole batch reads one version
        self._next: Version | None = None  # of the next batch
        self.reads: dict[int, Version] = {}

    @property
    def newest(self) -> Version:
        """The version of the current weights."""
        self._now = self._now or Version(self._layout())
        return self._now

    def begin(self) -> None:
        """Begins a batch. It reads the version that was the newest when the batch before began."""
        self._own, self._next = self._next or self.newest, self.newest

    def of_batch(self, later: bool) -> Version:
        """Returns the version of the current batch, or of a `later` one."""
        version = self._next if later else self._own
        assert version is not None
        return version

    def over(self) -> None:
        """Ends a batch, and keeps a copy of the weights if another batch will read them."""
        self._own = None
        self.keep()

    def keep(self) -> None:
        """Copies the weights if a pass will still read them, because they may change now."""
        if self._now is not None and any(self._now is version for version in self._alive()):
            self._now.keep()
        self._now = None

    def forget(self) -> None:
        """Drops all versions."""
        self._now = self._own = self._next = None
        self.reads.clear()

    @property
    def kept(self) -> list[Tensor]:
        """The tensors of all copies."""
        if not self.reads and self._own is self._next is None:
            return []
        versions = {id(version): version for version in self._alive()}
        return [x for version in versions.values() for x in version.kept or ()]

    def _alive(self) -> list[Version]:
        return [*self.reads.values(), *(version for version in (self._own, self._next) if version is not None)]
