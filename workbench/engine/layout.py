"""Where every parameter and gradient lies: flat vectors, and buckets that are slices of them.

No wire and no clock here. Parameters live as views of one flat vector per dtype, so that averaging, hashing and
handing over never copy; gradients are copied once, as they appear, into flat vectors of the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workbench.ops import Bucket, Part


class Place:
    """One parameter: its name and where it lies."""

    __slots__ = ("bucket", "grad", "name", "numel", "offset", "param")

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param, self.numel = name, param, param.numel()
        self.offset = 0  # in the flat vector of its dtype
        self.bucket = 0
        self.grad = param.data  # view of the flat gradients, set by Layout


class Layout:
    """The trainable parameters of a model in one order, and the buckets over them.

    The order is the reverse of registration until `reorder` gives the one in which gradients really appear.
    """

    def __init__(self, model: nn.Module, bucket_mb: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no trainable parameters")
        self.bucket_mb = bucket_mb
        self.order = [Place(n, p) for n, p in reversed(named)]
        self.weights: dict[torch.dtype, Tensor] = {}
        self.grads: dict[torch.dtype, Tensor] = {}
        self._place()

    def reorder(self, names: Iterable[str]) -> None:
        """Lays everything out anew in this order of parameter names."""
        by_name = {p.name: p for p in self.order}
        self.order = [by_name[n] for n in names]
        self._place()

    def rebucket(self, bucket_mb: float) -> None:
        """Cuts the same vectors into buckets of another size."""
        self.bucket_mb = bucket_mb
        self._cut()

    def _place(self) -> None:
        total: dict[torch.dtype, int] = {}
        for place in self.order:
            dtype = place.param.dtype
            place.offset = total.get(dtype, 0)
            total[dtype] = place.offset + place.numel
        device = self.order[0].param.device
        weights = {d: torch.empty(n, dtype=d, device=device) for d, n in total.items()}
        if {d: len(g) for d, g in self.grads.items()} != total:
            self.grads = {d: torch.zeros(n, dtype=d, device=device) for d, n in total.items()}
        for place in self.order:
            param = place.param
            view = weights[param.dtype][place.offset : place.offset + place.numel].view(param.shape)
            view.copy_(param.data)
            param.data = view
        self.weights = weights
        self._cut()

    def _cut(self) -> None:
        """A bucket closes once it holds `bucket_mb` (so, as in torch's DDP, it may be fuller), or at a new dtype."""
        limit = self.bucket_mb * 1e6
        groups: list[list[Place]] = []
        filled = limit
        for place in self.order:
            if filled >= limit or groups[-1][-1].param.dtype != place.param.dtype:
                groups.append([])
                filled = 0.0
            groups[-1].append(place)
            filled += place.numel * place.param.element_size()
            place.bucket = len(groups) - 1
            flat = self.grads[place.param.dtype]
            place.grad = flat[place.offset : place.offset + place.numel].view(place.param.shape)
        self.groups = groups
        self.buckets = [self._bucket(i, g, self.grads) for i, g in enumerate(groups)]

    def _bucket(self, index: int, group: list[Place], flats: dict[torch.dtype, Tensor]) -> Bucket:
        first, last = group[0], group[-1]
        base = first.offset
        parts = tuple(Part(p.name, tuple(p.param.shape), p.offset - base, p.offset - base + p.numel) for p in group)
        return Bucket(index, flats[first.param.dtype][base : last.offset + last.numel], parts, base)

    def params(self) -> list[Bucket]:
        """The parameters, cut like the gradients; writing into them changes the model."""
        return [self._bucket(i, g, self.weights) for i, g in enumerate(self.groups)]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.order)

    @property
    def nbytes(self) -> int:
        return sum(p.numel * p.param.element_size() for p in self.order)


def signature(model: nn.Module) -> int:
    """A 63-bit hash of the model's parameter names, shapes and dtypes: equal on all ranks or they cannot agree."""
    text = ";".join(f"{n}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for n, p in model.named_parameters())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A 63-bit hash of the bits of `tensors`."""
    digest = hashlib.blake2b(digest_size=8)
    for t in tensors:
        digest.update(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 1
