"""Where every parameter and gradient lies: in flat vectors, two for each bucket.

No wire and no clock here. Parameters live as views of their bucket's vector, so that averaging and handing over never
copy, and what a rank holds of one bucket can go without the others. Gradients are copied once, as they appear, into
their bucket's other vector; the gradient of a parameter that is a bucket of its own already is that vector, and is not
copied at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from workbench.host.placement.absent import Absent, unasked
from workbench.rank import Bucket, Part

SMALL = 32_768  # bytes of a gradient that may wait to be copied with others
ALONE = 0.5  # of a bucket's size: a parameter from there on is a bucket of its own


class Place:
    """One parameter: its name and where it lies."""

    __slots__ = ("alone", "bucket", "filled", "grad", "name", "numel", "param", "round", "small")

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param, self.numel = name, param, param.numel()
        self.bucket = 0
        self.alone = False  # is it a bucket of its own, which takes its gradient as it is?
        self.grad: Tensor | None = None  # where its gradient is copied to, once its bucket has room for it
        self.small = False  # is its gradient copied with the others of its bucket?
        self.round = 0  # the backward in which its gradient came last
        self.filled = False  # is its gradient zeros that no backward has added to?


class Layout:
    """The trainable parameters of a model in one order, and the buckets over them.

    The order is the reverse of registration, or `names` and no others, until `reorder` gives that of the gradients.
    """

    def __init__(self, model: nn.Module, bucket_mb: float, names: Iterable[str] | None = None) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("the model has no trainable parameters")
        self.bucket_mb = bucket_mb
        self.order = [Place(n, named[n]) for n in (reversed(named) if names is None else names)]
        self._slices: list[Bucket] = []
        self.weights: list[Tensor] = []
        self.begins: list[int] = []  # by bucket, the element of it with which the vector in `weights` begins
        self.held = 0  # bytes of the parameters that have memory here
        self.lying: dict[int, int] = {}  # by storage, the bucket of parameters that lies in it
        self.keeps_values = False  # are those let go kept aside, where others' are to be known at any time?
        self.roomy = False  # is there room for gradients that are to be exchanged?
        self.gives_back = False  # do buckets give that back once they are summed?
        self.unused: set[str] = set()  # names of parameters that the present gradients lack: no rank used them
        self._place()

    @property
    def sizes_only(self) -> bool:
        """Whether the parameters have shapes and no values: one model then stands for the models of all ranks."""
        return self.order[0].param.is_meta

    def reorder(self, names: Iterable[str]) -> None:
        """Lays everything out anew in this order of parameter names."""
        by_name = {p.name: p for p in self.order}
        self.order = [by_name[n] for n in names]
        self._place()

    def take(self, model: nn.Module, names: Collection[str], held: bool = True) -> None:
        """Lays out these parameters and no others, in the reverse order of registration; held: or has none of them."""
        self.order = [Place(n, p) for n, p in reversed(list(model.named_parameters())) if n in names]
        self._slices, self.weights = [], []  # what they lay in is nothing to these
        self._place(held)

    def rebucket(self, bucket_mb: float) -> None:
        """Lays everything out anew in buckets of another size."""
        self.bucket_mb = bucket_mb
        self._place()

    def _place(self, held: bool = True) -> None:
        """Moves the parameters into a vector for each bucket; of what lies in shards nothing is held then."""
        pairs = zip(self.weights, self._slices, strict=True)
        shards = not held or any(own.numel() < bucket.data.numel() for own, bucket in pairs)
        shards = shards or any(isinstance(place.param, Absent) for place in self.order)  # one rank's shard is a whole
        self._slices, self.buckets, self.roomy = [], [], False
        self._absent: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by bucket: it as a whole, and each parameter of it
        for place in self.order:
            place.grad = None  # the old vectors go before the new ones come
        self.groups = grouped(self.order, self.bucket_mb * 1e6)
        at: dict[torch.dtype, int] = {}
        for index, group in enumerate(self.groups):
            dtype, parts = group[0].param.dtype, tuple(in_a_row(group))
            n, gone = _numel(group), shards and not self.keeps_values
            whole = torch.full((1 if gone else n,), torch.nan, dtype=dtype, device=group[0].param.device).expand(n)
            for place, part in zip(group, parts, strict=True):
                view = whole[part.start : part.stop].view(place.param.shape)
                if not (gone or whole.is_meta):  # else there are no values to keep
                    view.copy_(place.param.data)
                place.param.data, place.bucket = view, index
            offset = at.get(dtype, 0)
            at[dtype] = offset + whole.numel()
            self._slices.append(Bucket(index, whole, parts, offset))
            self.buckets.append(Bucket(index, self._stand_in(group), parts, offset))
            self.buckets[-1].forget = partial(self._give_back, index)
        self.weights = [b.data.new_empty(0) if shards else b.data for b in self._slices]
        self.begins = [0] * len(self.weights)
        self.held = sum(own.numel() * own.element_size() for own in self.weights)
        self.lying = {w.untyped_storage()._cdata: index for index, w in enumerate(self.weights)}

    def hold(self, wanted: Bucket) -> Bucket:
        """Of a bucket of parameters only these elements have memory here: a shard's, none, or all of them again.

        To hold more than is held `data` is where it then lies, with the values that are there. A parameter that is not
        whole has no values but NaN. Returns the bucket as it lies now.
        """
        bucket, own = self._slices[wanted.index], self.weights[wanted.index]
        start, n, whole = wanted.offset - bucket.offset, wanted.data.numel(), bucket.data.numel()
        if n == whole:
            self._lie(wanted.index, wanted.data)
        elif n > own.numel():
            self._put(wanted.index, wanted.data, start)
        elif n < own.numel():
            begin = start - self.begins[wanted.index]
            if own.numel() == whole and not self.keeps_values:
                self._lie(wanted.index, self._nothing(wanted.index))
            self._put(wanted.index, own[begin : begin + n].clone(), start)
        return wanted.like(self.weights[wanted.index])

    def _lie(self, index: int, data: Tensor) -> None:
        """The parameters of this bucket lie in `data`, or have no values where that is `_nothing`."""
        bucket, nothing = self._slices[index], self._absent.get(index)
        bucket.data = data
        self._put(index, data, 0)
        if nothing is not None and data is nothing[0]:
            views = nothing[1]
        else:
            views = [data[start:stop].view(shape) for _, shape, start, stop in bucket.parts]
        with unasked():
            for place, view in zip(self.groups[index], views, strict=True):
                place.param.data = view

    def _nothing(self, index: int) -> Tensor:
        """What stands for a bucket of parameters that are not here: NaN, in the memory of one element."""
        if index not in self._absent:
            bucket = self._slices[index]
            one = bucket.data.new_full((), torch.nan)
            self._absent[index] = one.expand(bucket.data.numel()), [one.expand(p.shape) for p in bucket.parts]
        return self._absent[index][0]

    def _put(self, index: int, data: Tensor, begin: int) -> None:
        """What is here of a bucket of parameters is `data`, from element `begin` on."""
        was = self.weights[index]
        self.held += data.numel() * data.element_size() - was.numel() * was.element_size()
        if self.lying.get(was.untyped_storage()._cdata) == index:
            del self.lying[was.untyped_storage()._cdata]
        self.lying[data.untyped_storage()._cdata] = index
        self.weights[index], self.begins[index] = data, begin

    def lies(self, index: int) -> Bucket:
        """A bucket of parameters as it lies at any time; `params` are all of them as they lie now."""
        return self._slices[index]

    def lie_in(self, weights: list[Tensor]) -> None:
        """The parameters lie in these vectors, one for each bucket, from now on, and take the values that are there."""
        for index, whole in enumerate(weights):
            self._lie(index, whole)

    def _stand_in(self, group: list[Place]) -> Tensor:
        """A vector of a group's size without memory: where no gradients are, or one that lies elsewhere."""
        for place in group:
            nbytes = place.param.element_size() * place.numel
            place.grad, place.alone, place.small = None, len(group) == 1, len(group) > 1 and nbytes <= SMALL
        return torch.zeros(1, dtype=group[0].param.dtype, device=group[0].param.device).expand(_numel(group))

    def make_room(self) -> None:
        """Buckets of several parameters have room for gradients until `clear`; if they give it back, as one comes."""
        if self.roomy:
            return
        self.roomy = True
        for bucket in self.buckets if not self.gives_back else ():
            if len(bucket.parts) > 1:
                self._room(bucket.index)

    def _room(self, index: int) -> None:
        """The gradients of this bucket have a vector."""
        group, bucket = self.groups[index], self.buckets[index]
        bucket.data = torch.zeros(_numel(group), dtype=group[0].param.dtype, device=group[0].param.device)
        for place, part in zip(group, bucket.parts, strict=True):
            place.grad = bucket.data[part.start : part.stop].view(place.param.shape)

    def _give_back(self, index: int) -> None:
        """Holds the gradients of this bucket no longer. Whoever still reads them, as a stream may, holds them itself.

        Their memory is not taken away by force: autograd may have lent the same to another gradient.
        """
        self.gives_back = True
        group = self.groups[index]
        for place in group:
            place.param.grad = None
        self.buckets[index].data = self._stand_in(group)

    def clear(self) -> None:
        """Between steps: no bucket keeps room for gradients, as where they are not exchanged."""
        self.roomy = self.gives_back = False
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            bucket.data = self._stand_in(group)

    def keep(self, place: Place, grad: Tensor) -> None:
        """The gradient of `place` has come: it goes into its bucket, and `param.grad` is what lies there."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if place.alone:
            place.param.grad = grad = grad.contiguous()
            self.buckets[place.bucket].data = grad.view(-1)
        else:
            if place.grad is None:
                self._room(place.bucket)
            home = cast(Tensor, place.grad)
            home.copy_(grad)
            place.param.grad = home

    def full(self, index: int) -> Bucket:
        """Bucket `index`, whose gradients have all come: the small ones are copied now, in one call."""
        small = [p for p in self.groups[index] if p.small]
        if small:
            if small[0].grad is None:
                self._room(index)
            homes = cast(list[Tensor], [p.grad for p in small])
            grads = cast(list[Tensor], [p.param.grad for p in small])
            torch._foreach_copy_(homes, [g.to_dense() if g.is_sparse else g for g in grads])
            for place in small:
                place.param.grad = place.grad
        return self.buckets[index]

    def take_in(self) -> None:
        """All gradients lie where they are exchanged from, so that autograd adds to them there."""
        for place in self.order:
            place.filled = place.param.grad is None
        self.grads()

    def drop_unused(self) -> None:
        """Before an update: parameters that no rank used have no gradient, so that the optimizer leaves them alone."""
        for place in self.order if self.unused else ():
            if place.name in self.unused:
                place.param.grad = None

    def drop_frozen(self) -> None:
        """Before an update by this rank's own gradients: parameters that are frozen here have none."""
        for place in self.order:
            if not place.param.requires_grad:
                place.param.grad = None

    def grads(self) -> list[Bucket]:
        """All gradients, each in its bucket's vector, zero where none has come; writing into them changes the step."""
        self.make_room()
        for place in self.order:
            if place.param.grad is None:
                place.param.grad = torch.zeros_like(place.param)
            if not place.small:
                self.keep(place, place.param.grad)
        return [self.full(b.index) for b in self.buckets]

    def let_go(self, index: int | None = None) -> None:
        """The gradients are used up, those of one bucket or of all: what was not copied is held no longer."""
        for group, bucket in zip(self.groups, self.buckets, strict=True):
            bucket.kept = None if index in (None, bucket.index) else bucket.kept
            if len(group) == 1 and bucket.data.stride(0) and index in (None, bucket.index):
                bucket.data = bucket.data.new_zeros(1).expand(bucket.data.numel())

    def params(self) -> list[Bucket]:
        """The parameters, cut like the gradients; writing into them changes the model, where they are whole here."""
        return [Bucket(b.index, b.data, b.parts, b.offset) for b in self._slices]

    @property
    def parts(self) -> list[Part]:
        """Every parameter, at its place in its bucket."""
        return [part for bucket in self.buckets for part in bucket.parts]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.order)

    @property
    def nbytes(self) -> int:
        return sum(p.numel * p.param.element_size() for p in self.order)


def grouped(order: list[Place], limit: float) -> list[list[Place]]:
    """The buckets of parameters that come in `order`, in the order in which they fill.

    A bucket closes once it holds `limit` bytes (so, as in torch's DDP, it may be fuller) and never mixes dtypes. A
    parameter of at least half of that is alone, so that its gradient needs no copy.
    """
    closed: list[list[Place]] = []
    open_: dict[torch.dtype, list[Place]] = {}
    filled: dict[torch.dtype, int] = {}
    for place in order:
        dtype, nbytes = place.param.dtype, place.numel * place.param.element_size()
        if nbytes >= ALONE * limit:
            closed.append([place])
            continue
        open_.setdefault(dtype, []).append(place)
        filled[dtype] = filled.get(dtype, 0) + nbytes
        if filled[dtype] >= limit:
            closed.append(open_.pop(dtype))
            filled[dtype] = 0
    return closed + list(open_.values())


def in_a_row(group: list[Place]) -> Iterator[Part]:
    """Where in its bucket each parameter lies."""
    at = 0
    for place in group:
        yield Part(place.name, tuple(place.param.shape), at, at + place.numel)
        at += place.numel


def _numel(group: list[Place]) -> int:
    return sum(p.numel for p in group)
