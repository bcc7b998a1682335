"""A parameter cut to this rank's slice, with the whole shape as an attribute."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

_WHOLE = "_workbench_whole"  # whole shape's attribute


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the whole parameter's shape, even of a slice."""
    return tuple(getattr(param, _WHOLE, None) or param.shape)


def whole_numel(param: Tensor) -> int:
    """Counts the whole parameter's elements."""
    return prod(whole_shape(param))


def set_slice(param: nn.Parameter, data: Tensor, shape: tuple[int, ...]) -> None:
    """Sets `param` to `data`: the whole tensor, or a slice of a tensor of that shape."""
    param.grad = None
    if param.shape != data.shape:  # another dtype first, so that torch drops an earlier graph's metadata
        other = torch.float32 if data.dtype == torch.float64 else torch.float64
        param.data = data.new_empty(0, dtype=other)
    param.data = data
    if tuple(data.shape) == shape:
        param.__dict__.pop(_WHOLE, None)
    else:
        setattr(param, _WHOLE, shape)
