"""The weights that a stage's passes read: those that are there, or a copy from before they were changed.

What autograd keeps of the weights for a backward is not the weights but which version of them it was, so that a version
is copied only when it is about to change and still to be read. A pass of a version that has been copied runs while the
parameters lie in the copy; whoever writes into the weights beside it writes where they always are.
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
    """The weights at one time.

    kept: a copy by bucket as these were then, once the weights may have changed; None: they are those there
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.kept: list[Tensor] | None = None
        self._cut: list[tuple[list[Place], tuple[Part, ...]]] = []  # where parameters lie in the copy, by bucket

    def keep(self) -> None:
        """The weights may change from now on, and the buckets."""
        if self.kept is not None:
            return
        self.kept = [weights.clone() for weights in self.layout.weights]
        self._cut = [(group, self.layout.lies(index).parts) for index, group in enumerate(self.layout.groups)]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside a forward runs that reads this version; so does its backward, whatever is there by then."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), self.backward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside the backward of such a forward runs."""
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
        """What autograd keeps in place of `x`."""
        if x.layout != torch.strided or x.is_inference():
            return x
        place = x.untyped_storage()._cdata
        if self.kept is not None:  # nobody writes into a copy, and parameters that lie in it look as if somebody had
            return x if any(place == copy.untyped_storage()._cdata for copy in self.kept) else _other(x)
        index = self.layout.lying.get(place)
        if index is None:
            return _other(x)
        return _Weights(self, index, x) if x.dtype == self.layout.weights[index].dtype else x.clone()


class _Other(NamedTuple):
    """What is no weight, and how often it had been written into."""

    x: Tensor
    version: int

    def read(self) -> Tensor:
        """torch looks for this itself where nobody keeps something in a tensor's place."""
        if self.x._version != self.version:
            raise StrategyError(
                f"backward reads a tensor of {list(self.x.shape)} that was changed in place after its forward: where "
                f"several micro-batches are in flight the next one's forward does that; let the model make a new tensor"
            )
        return self.x


def _other(x: Tensor) -> _Other:
    return _Other(packed(x), x._version)


class _Weights:
    """A view of the weights, of a version."""

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
    """The versions of one stage's weights that are still to be read.

    reads: by number of a micro-batch in flight, the version that its forward has read
    """

    def __init__(self, layout: Callable[[], Layout]) -> None:
        self._layout = layout
        self._now: Version | None = None
        self._own: Version | None = None  # of the batch under way and the next, where all of one read the same
        self._next: Version | None = None
        self.reads: dict[int, Version] = {}

    @property
    def newest(self) -> Version:
        """That of the weights there are."""
        self._now = self._now or Version(self._layout())
        return self._now

    def begin(self) -> None:
        """A batch begins, which reads what was the newest as the one before began, where there was one."""
        self._own, self._next = self._next or self.newest, self.newest

    def of_batch(self, later: bool) -> Version:
        """Of the batch under way, or a `later` one."""
        version = self._next if later else self._own
        assert version is not None
        return version

    def over(self) -> None:
        """A batch is over: nobody reads its version again, unless another one does."""
        self._own = None
        self.keep()

    def keep(self) -> None:
        """The weights may change from now on: a copy of them is kept where they are still to be read."""
        if self._now is not None and any(self._now is version for version in self._alive()):
            self._now.keep()
        self._now = None

    def forget(self) -> None:
        """Nothing is to be read again."""
        self._now = self._own = self._next = None
        self.reads.clear()

    @property
    def kept(self) -> list[Tensor]:
        """All copies."""
        if not self.reads and self._own is self._next is None:
            return []
        versions = {id(version): version for version in self._alive()}
        return [x for version in versions.values() for x in version.kept or ()]

    def _alive(self) -> list[Version]:
        return [*self.reads.values(), *(version for version in (self._own, self._next) if version is not None)]
