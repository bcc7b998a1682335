"""Flat vectors for each bucket: one of parameters and one of gradients.

Parameters are views, so averaging and hand-overs never copy. A rank can free one bucket. A gradient is copied once into
its bucket's vector, unless its parameter is a bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from workbench.host.placement.bucket_groups import ParameterPlace, count_elements, group_parameters, place_in_order
from workbench.host.placement.replaced_data import explain_copied, find_replaced, require_like
from workbench.host.placement.unmaterialized import UnmaterializedParameter, prevent_fetches
from workbench.rank import Bucket, Part


class ParameterLayout:
    """The trainable parameters of a model, in order, and their buckets.

    The order is `names`, or the reverse of registration.
    """

    def __init__(self, model: nn.Module, bucket_mb: float, names: Iterable[str] | None = None) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("the model has no trainable parameters")
        self.bucket_mb = bucket_mb
        self.order = [ParameterPlace(n, named[n]) for n in (reversed(named) if names is None else names)]
        self._slices: list[Bucket] = []
        self.weights: list[Tensor] = []
        self.begins: list[int] = []  # first elements in `weights`
        self.held = 0  # bytes of parameters
        self.lying: dict[int, int] = {}  # buckets by storage
        self.keeps_values = False  # released parameters keep their values (simulator)
        self.roomy = False  # has gradients' memory
        self.gives_back = False  # releases summed buckets
        self.unused: set[str] = set()  # that no rank used in this step
        self._place_parameters()

    @property
    def has_sizes_only(self) -> bool:
        """Whether parameters have no values. Then all ranks share one model."""
        return self.order[0].param.is_meta

    def reorder_buckets(self, names: Iterable[str]) -> None:
        by_name = {p.name: p for p in self.order}
        self.order = [by_name[n] for n in names]
        self._place_parameters()

    def take_parameters(self, model: nn.Module, names: Collection[str], held: bool = True) -> None:
        """Builds buckets of these parameters only, in reverse order of registration.

        held: False if this rank has no values
        """
        self.order = [ParameterPlace(n, p) for n, p in reversed(list(model.named_parameters())) if n in names]
        self._slices, self.weights = [], []  # the storage of other parameters
        self._place_parameters(held)

    def resize_buckets(self, bucket_mb: float) -> None:
        self.bucket_mb = bucket_mb
        self._place_parameters()

    def _place_parameters(self, held: bool = True) -> None:
        """If the parameters are in shards, this rank then holds none."""
        pairs = zip(self.weights, self._slices, strict=True)
        shards = not held or any(own.numel() < bucket.data.numel() for own, bucket in pairs)
        shards = shards or any(
            isinstance(place.param, UnmaterializedParameter) for place in self.order
        )  # one rank's shard is the whole
        self._slices, self.buckets, self.roomy = [], [], False
        self._copied: dict[int, dict[str, int]] = {}  # by bucket with a copy elsewhere: versions of its parameters
        self._absent: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by bucket: NaN for it and its parameters
        for place in self.order:
            place.release_gradient()  # before new memory
        self.groups = group_parameters(self.order, self.bucket_mb * 1e6)
        at: dict[torch.dtype, int] = {}
        for index, group in enumerate(self.groups):
            dtype, parts = group[0].param.dtype, tuple(place_in_order(group))
            n, gone = count_elements(group), shards and not self.keeps_values
            whole = torch.full((1 if gone else n,), torch.nan, dtype=dtype, device=group[0].param.device).expand(n)
            for place, part in zip(group, parts, strict=True):
                view = whole[part.start : part.stop].view(place.param.shape)
                with prevent_fetches():
                    if not (gone or whole.is_meta):
                        view.copy_(place.param.data)
                    place.point_into(index, view)
                place.begin_bucket(len(group))
            offset = at.get(dtype, 0)
            at[dtype] = offset + whole.numel()
            self._slices.append(Bucket(index, whole, parts, offset))
            forget = partial(self._release_gradients, index)
            self.buckets.append(Bucket(index, self._make_stand_in(group), parts, offset, forget))
        self.weights = [b.data.new_empty(0) if shards else b.data for b in self._slices]
        self.begins = [0] * len(self.weights)
        self.held = sum(own.numel() * own.element_size() for own in self.weights)
        self.lying = {w.untyped_storage()._cdata: index for index, w in enumerate(self.weights)}

    def hold_bucket(self, wanted: Bucket) -> Bucket:
        """Keeps memory for a shard of a parameter bucket, nothing, or the whole.

        To hold more, pass the values in `data`, which becomes the storage. Incomplete parameters are NaN.
        """
        bucket, own = self._slices[wanted.index], self.weights[wanted.index]
        start, n, whole = wanted.offset - bucket.offset, wanted.data.numel(), bucket.data.numel()
        if n == whole:
            self._point_parameters(wanted.index, wanted.data)
        elif n > own.numel():
            self._record_weights(wanted.index, wanted.data, start)
        elif n < own.numel():
            self.adopt_replaced_data(wanted.index)
            begin = start - self.begins[wanted.index]
            if own.numel() == whole and not self.keeps_values:
                self._point_parameters(wanted.index, self._make_absent_data(wanted.index))
            self._record_weights(wanted.index, own[begin : begin + n].clone(), start)
        return wanted.like(self.weights[wanted.index])

    def _point_parameters(self, index: int, data: Tensor) -> None:
        bucket, nothing = self._slices[index], self._absent.get(index)
        bucket.data = data
        self._record_weights(index, data, 0)
        if nothing is not None and data is nothing[0]:
            views = nothing[1]
        else:
            views = [data[start:stop].view(shape) for _, shape, start, stop in bucket.parts]
        with prevent_fetches():
            for place, view in zip(self.groups[index], views, strict=True):
                place.param.data = view

    def _make_absent_data(self, index: int) -> Tensor:
        if index not in self._absent:
            bucket = self._slices[index]
            one = bucket.data.new_full((), torch.nan)
            self._absent[index] = one.expand(bucket.data.numel()), [one.expand(p.shape) for p in bucket.parts]
        return self._absent[index][0]

    def list_released(self) -> list[int]:
        """Returns the buckets that this rank does not hold whole."""
        return [i for i, own in enumerate(self.weights) if own.numel() < self._slices[i].data.numel()]

    def adopt_released_writes(self, index: int, written: Collection[str]) -> None:
        """Copies parameters that the model has written after their bucket was released into this rank's shard.

        Only the simulator computes with the values of released buckets. Raises the errors of `adopt_replaced_data`.
        """
        bucket, own, begin = self._slices[index], self.weights[index], self.begins[index]
        for place, part in zip(self.groups[index], bucket.parts, strict=True):
            if place.name in written:
                if index in self._copied:
                    raise explain_copied(place.name)
                require_like(place.name, place.param.data, part, own)
                whole = bucket.data[part.start : part.stop].view(part.shape)
                if place.param.data_ptr() != whole.data_ptr():
                    place.param.data = whole.copy_(place.param.data)
                first, stop = max(part.start, begin), min(part.stop, begin + own.numel())
                if first < stop:
                    values = place.param.data.reshape(-1)[first - part.start : stop - part.start]
                    own[first - begin : stop - begin].copy_(values)

    def adopt_replaced_data(self, index: int | None = None) -> None:
        """Copies data that the model assigned to a parameter (`p.data = x`) into its bucket; None: into all buckets.

        Raises StrategyError if the new data has another shape or dtype, or if a copy elsewhere is stepped.
        """
        for bucket in self._slices if index is None else [self._slices[index]]:
            own = self.weights[bucket.index]
            if own is not bucket.data or own.is_meta or type(own) is not Tensor or not own.stride(0):
                continue  # sizes only, or not whole
            at, size, copied = own.data_ptr(), own.element_size(), self._copied.get(bucket.index, {})
            with prevent_fetches():
                group = self.groups[bucket.index]
                found = find_replaced([place.param for place in group], bucket.parts, at, size)
                versions = {place.name: place.param._version for place in group} if copied else {}
            written = [part.name for _, part in found] or [n for n, seen in versions.items() if seen != copied[n]]
            if copied and written:
                raise explain_copied(written[0])
            for x, part in found:
                require_like(part.name, x, part, own)
                own[part.start : part.stop].view(part.shape).copy_(x.clone())  # it may be a transposed view of `own`
            if found:
                self._point_parameters(bucket.index, own)

    def note_copy(self, index: int, exists: bool) -> None:
        """Notes whether a copy of this bucket elsewhere is stepped, so that writes into its parameters are lost."""
        self._copied.pop(index, None)
        if exists and not self.has_sizes_only:
            with prevent_fetches():
                self._copied[index] = {place.name: place.param._version for place in self.groups[index]}

    def _record_weights(self, index: int, data: Tensor, begin: int) -> None:
        """begin: where `data` begins in its bucket"""
        was = self.weights[index]
        self.held += data.numel() * data.element_size() - was.numel() * was.element_size()
        if self.lying.get(was.untyped_storage()._cdata) == index:
            del self.lying[was.untyped_storage()._cdata]
        self.lying[data.untyped_storage()._cdata] = index
        self.weights[index], self.begins[index] = data, begin

    def weight_bucket(self, index: int) -> Bucket:
        """Returns the bucket that follows every move. `list_params` returns copies."""
        return self._slices[index]

    def adopt_vectors(self, weights: list[Tensor]) -> None:
        """Makes the parameters views of these vectors."""
        for index, whole in enumerate(weights):
            self._point_parameters(index, whole)

    def _make_stand_in(self, group: list[ParameterPlace]) -> Tensor:
        return torch.zeros(1, dtype=group[0].param.dtype, device=group[0].param.device).expand(count_elements(group))

    def allocate_gradients(self) -> None:
        """Allocates gradients of buckets with several parameters, until `drop_gradients`.

        If buckets release them, each allocates at its first gradient.
        """
        if self.roomy:
            return
        self.roomy = True
        for bucket in self.buckets if not self.gives_back else ():
            if len(bucket.parts) > 1:
                self._allocate_gradients(bucket.index)

    def _allocate_gradients(self, index: int) -> None:
        group, bucket = self.groups[index], self.buckets[index]
        bucket.allocate()
        try:
            for place, part in zip(group, bucket.parts, strict=True):
                place.place_gradient(bucket.data, part)
        except RuntimeError:
            self._require_shapes(index)
            raise

    def _require_shapes(self, index: int) -> None:
        """Raises StrategyError if the model has replaced the data of a bucket's parameter by another shape or dtype."""
        with prevent_fetches():
            for place, part in zip(self.groups[index], self.buckets[index].parts, strict=True):
                require_like(part.name, place.param.data, part, self.buckets[index].data)

    def _release_gradients(self, index: int) -> None:
        """Frees no storage: autograd may share it, and a stream that still reads it has a reference."""
        self.gives_back = True
        for place in self.groups[index]:
            place.param.grad = None
        self._release_bucket(index)

    def drop_gradients(self) -> None:
        self.roomy = self.gives_back = False
        for bucket in self.buckets:
            self._release_bucket(bucket.index)

    def _release_bucket(self, index: int) -> None:
        for place in self.groups[index]:
            place.release_gradient()
        self.buckets[index].release()

    def store_gradient(self, place: ParameterPlace, grad: Tensor) -> None:
        """Makes `param.grad` the stored tensor. Raises StrategyError if the model has replaced a parameter's shape."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if grad.numel() != place.numel:
            self._require_shapes(place.bucket)
        if place.alone:
            place.param.grad = grad = grad.contiguous()
            self.buckets[place.bucket].data = grad.view(-1)
        else:
            if place.grad is None:
                self._allocate_gradients(place.bucket)
            home = cast(Tensor, place.grad)
            home.copy_(grad)
            place.param.grad = home

    def fill_bucket(self, index: int) -> Bucket:
        """Copies the small gradients in one call. Raises StrategyError if the model has replaced a shape."""
        small = [p for p in self.groups[index] if p.small]
        if small:
            if small[0].grad is None:
                self._allocate_gradients(index)
            homes = cast(list[Tensor], [p.grad for p in small])
            grads = cast(list[Tensor], [p.param.grad for p in small])
            try:
                torch._foreach_copy_(homes, [g.to_dense() if g.is_sparse else g for g in grads])
            except RuntimeError:
                self._require_shapes(index)
                raise
            for place in small:
                place.param.grad = place.grad
        return self.buckets[index]

    def move_gradients(self) -> None:
        """Moves gradients into the vectors, where autograd adds to them."""
        for place in self.order:
            place.note_filled()
        self.list_grads()

    def note_unused(self, names: set[str]) -> None:
        """Notes which parameters no rank used in this step."""
        self.unused = names

    def drop_unused(self) -> None:
        """Lets the optimizer skip unused parameters."""
        for place in self.order if self.unused else ():
            if place.name in self.unused:
                place.param.grad = None

    def drop_frozen(self) -> None:
        """Call it before an update by this rank's own gradients."""
        for place in self.order:
            if not place.param.requires_grad:
                place.param.grad = None

    def list_grads(self) -> list[Bucket]:
        """Returns the gradients, zeros for missing ones. Writes change the step."""
        self.allocate_gradients()
        for place in self.order:
            if place.param.grad is None:
                place.param.grad = torch.zeros_like(place.param)
            if not place.small:
                self.store_gradient(place, place.param.grad)
        return [self.fill_bucket(b.index) for b in self.buckets]

    def release_gradients(self, index: int | None = None) -> None:
        """Releases used gradients that were not copied."""
        for bucket in self.buckets:
            if index in (None, bucket.index):
                bucket.release_used()

    def list_params(self) -> list[Bucket]:
        """Returns the parameters, cut like the gradients. Writes into whole ones change the model."""
        self.adopt_replaced_data()
        return [Bucket(b.index, b.data, b.parts, b.offset) for b in self._slices]

    @property
    def bucket_parts(self) -> list[Part]:
        return [part for bucket in self.buckets for part in bucket.parts]

    @property
    def frozen_names(self) -> list[str]:
        """Parameters here that the model has frozen during the run."""
        return [place.name for place in self.order if not place.param.requires_grad]

    @property
    def element_count(self) -> int:
        return sum(p.numel for p in self.order)

    @property
    def byte_count(self) -> int:
        return sum(p.numel * p.param.element_size() for p in self.order)
