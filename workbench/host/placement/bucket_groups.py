"""Groups of parameters that share a bucket, in the order in which buckets fill."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workbench.rank import Part

SMALL_BYTES = 32_768  # smaller gradients are copied in one call
ALONE_SHARE = 0.5  # of a bucket, from which a parameter is a bucket


class ParameterPlace:
    """A parameter's place in the buckets."""

    __slots__ = ("alone", "bucket", "filled", "grad", "name", "numel", "param", "round", "small")

    def __init__(self, name: str, param: nn.Parameter) -> None:
        self.name, self.param, self.numel = name, param, param.numel()
        self.bucket = 0
        self.alone = False  # is a bucket
        self.grad: Tensor | None = None  # gradient's place in the bucket
        self.small = False  # gradient is copied with others
        self.round = 0  # of the backward that made its gradient
        self.filled = False  # gradient is zeros so far

    def point_into(self, index: int, view: Tensor) -> None:
        """Makes the parameter a view of bucket `index`."""
        self.param.data, self.bucket = view, index

    def begin_bucket(self, size: int) -> None:
        """Decides how its gradient reaches a bucket of `size` parameters, which has no memory yet."""
        nbytes = self.param.element_size() * self.numel
        self.grad, self.alone, self.small = None, size == 1, size > 1 and nbytes <= SMALL_BYTES

    def place_gradient(self, whole: Tensor, part: Part) -> None:
        """Places its gradient in `whole`, the gradients of its bucket."""
        self.grad = whole[part.start : part.stop].view(self.param.shape)

    def release_gradient(self) -> None:
        """Lets go of its bucket's memory."""
        self.grad = None

    def note_filled(self) -> None:
        """Notes that its gradient begins as zeros if it has none."""
        self.filled = self.param.grad is None


def group_parameters(order: list[ParameterPlace], limit: float) -> list[list[ParameterPlace]]:
    """Groups the parameters into buckets of one dtype, in the order in which these fill.

    A bucket closes once it holds `limit` bytes, so it may be larger, as in torch's DDP. A parameter of at least
    `ALONE_SHARE * limit` bytes is a bucket.
    """
    closed: list[list[ParameterPlace]] = []
    open_: dict[torch.dtype, list[ParameterPlace]] = {}
    filled: dict[torch.dtype, int] = {}
    for place in order:
        dtype, nbytes = place.param.dtype, place.numel * place.param.element_size()
        if nbytes >= ALONE_SHARE * limit:
            closed.append([place])
            continue
        open_.setdefault(dtype, []).append(place)
        filled[dtype] = filled.get(dtype, 0) + nbytes
        if filled[dtype] >= limit:
            closed.append(open_.pop(dtype))
            filled[dtype] = 0
    return closed + list(open_.values())


def place_in_order(group: list[ParameterPlace]) -> Iterator[Part]:
    """Yields each parameter's place."""
    at = 0
    for place in group:
        yield Part(place.name, tuple(place.param.shape), at, at + place.numel)
        at += place.numel


def count_elements(group: list[ParameterPlace]) -> int:
    """Returns how many elements the parameters of a bucket have together."""
    return sum(p.numel for p in group)
