"""A parameter of which a rank has one slice: its data is that slice, and it knows the shape of the whole."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

_WHOLE = "_workbench_whole"  # the attribute of a parameter in slices that says its whole shape


def shape_of(param: Tensor) -> tuple[int, ...]:
    """The shape of all of it, wherever that is."""
    return tuple(getattr(param, _WHOLE, None) or param.shape)


def numel_of(param: Tensor) -> int:
    """The elements of all of it."""
    return prod(shape_of(param))


def lay(param: nn.Parameter, data: Tensor, shape: tuple[int, ...]) -> None:
    """`param` is `data` from now on, all of it or one slice of what has that shape."""
    param.grad = None
    if param.shape != data.shape:  # of another dtype for once, so that torch forgets what a graph of before says of it
        other = torch.float32 if data.dtype == torch.float64 else torch.float64
        param.data = data.new_empty(0, dtype=other)
    param.data = data
    if tuple(data.shape) == shape:
        param.__dict__.pop(_WHOLE, None)
    else:
        setattr(param, _WHOLE, shape)
