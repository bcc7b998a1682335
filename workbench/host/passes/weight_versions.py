"""The versions of a stage's weights that passes read: current or older copies.

Autograd keeps a reference to a version. It is copied only if a pass will still read it when the weights change. During
such a pass the parameters' data points into the copy. Other code still writes to the weights' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.host.memory.storages import pack_tensor
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Part, StrategyError


class WeightVersion:
    """The weights between two updates.

    kept: a copy by bucket, once the weights may have changed; None: the current weights are this version
    """

    def __init__(self, layout: ParameterLayout) -> None:
        self.layout = layout
        self.kept: list[Tensor] | None = None
        self._cut: list[tuple[list[ParameterPlace], tuple[Part, ...]]] = []  # places in the copy, by bucket

    def copy_weights(self) -> None:
        """Call it before the weights or the buckets change."""
        if self.kept is not None:
            return
        self.kept = [weights.clone() for weights in self.layout.weights]
        self._cut = [(group, self.layout.weight_bucket(index).parts) for index, group in enumerate(self.layout.groups)]

    @contextmanager
    def read_in_forward(self) -> Iterator[None]:
        """Lets a forward and its backward read this version."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, _unpack_tensor), self.read_in_backward():
            yield

    @contextmanager
    def read_in_backward(self) -> Iterator[None]:
        """Points the parameters' data into the copy, if there is one."""
        there = [(place.param, place.param.data) for group, _ in self._cut for place in group]
        for (group, parts), copy in zip(self._cut, self.kept or (), strict=True):
            for place, part in zip(group, parts, strict=True):
                place.param.data = copy[part.start : part.stop].view(part.shape)
        try:
            yield
        finally:
            for param, data in there:
                param.data = data

    def _pack_tensor(self, x: Tensor) -> Any:
        if x.layout != torch.strided or x.is_inference():
            return x
        place = x.untyped_storage()._cdata
        if self.kept is not None:  # nothing writes a copy, though views' version counters change
            return x if any(place == copy.untyped_storage()._cdata for copy in self.kept) else _save_tensor(x)
        index = self.layout.lying.get(place)
        if index is None:
            return _save_tensor(x)
        return _WeightView(self, index, x) if x.dtype == self.layout.weights[index].dtype else x.clone()


class _SavedTensor(NamedTuple):
    x: Tensor
    version: int

    def read_tensor(self) -> Tensor:
        """Raises StrategyError if the tensor was changed in place after its forward.

        torch checks only tensors that it saves without hooks.
        """
        if self.x._version != self.version:
            raise StrategyError(
                f"backward reads a tensor of {list(self.x.shape)} that was changed in place after its forward, "
                f"probably by the forward of the next micro-batch; make a new tensor in the model instead"
            )
        return self.x


def _save_tensor(x: Tensor) -> _SavedTensor:
    return _SavedTensor(pack_tensor(x), x._version)


class _WeightView:
    def __init__(self, version: WeightVersion, index: int, x: Tensor) -> None:
        self.version, self.index = version, index
        begin = version.layout.weights[index].storage_offset()
        self.at = x.size(), x.stride(), x.storage_offset() - begin

    def read_tensor(self) -> Tensor:
        version = self.version
        own = version.layout.weights if version.kept is None else version.kept
        size, stride, begin = self.at
        return own[self.index].as_strided(size, stride, own[self.index].storage_offset() + begin)


def _unpack_tensor(kept: Any) -> Tensor:
    return kept.read_tensor() if isinstance(kept, (_WeightView, _SavedTensor)) else kept


class WeightVersions:
    """Versions that passes still read.

    reads: by a micro-batch's number, the version that its forward reads
    """

    def __init__(self, layout: Callable[[], ParameterLayout]) -> None:
        self._layout = layout
        self._now: WeightVersion | None = None
        self._own: WeightVersion | None = None  # the current batch's
        self._next: WeightVersion | None = None  # the next batch's
        self.reads: dict[int, WeightVersion] = {}

    @property
    def newest_version(self) -> WeightVersion:
        self._now = self._now or WeightVersion(self._layout())
        return self._now

    def begin_batch(self) -> None:
        """Gives the batch the version that was the newest when the batch before began."""
        self._own, self._next = self._next or self.newest_version, self.newest_version

    def version_of_batch(self, later: bool) -> WeightVersion:
        version = self._next if later else self._own
        assert version is not None
        return version

    def end_batch(self) -> None:
        self._own = None
        self.keep_weights()

    def keep_weights(self) -> None:
        """Call it before the weights change."""
        if self._now is not None and any(self._now is version for version in self._list_alive()):
            self._now.copy_weights()
        self._now = None

    def drop_versions(self) -> None:
        self._now = self._own = self._next = None
        self.reads.clear()

    @property
    def kept(self) -> list[Tensor]:
        if not self.reads and self._own is self._next is None:
            return []
        versions = {id(version): version for version in self._list_alive()}
        return [x for version in versions.values() for x in version.kept or ()]

    def _list_alive(self) -> list[WeightVersion]:
        return [*self.reads.values(), *(version for version in (self._own, self._next) if version is not None)]
