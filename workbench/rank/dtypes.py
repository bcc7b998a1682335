"""The element types of parameters and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")


def can_average(kind: dtype) -> bool:
    """Whether numbers of this type have a mean of the same type. Integers have none."""
    return kind.is_floating_point or kind.is_complex


def as_real(x: Tensor) -> Tensor:
    """Returns a complex tensor `(...)` as a view `(..., 2)` of reals. A real tensor stays."""
    if not x.is_complex():
        return x
    import torch

    return torch.view_as_real(x)
