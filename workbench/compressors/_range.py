"""Putting a wide number into a narrow type: what is finite stays finite."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(kind: torch.dtype) -> torch.dtype:
    """What sums and residuals of numbers in `kind` are kept in: at least float32."""
    return torch.promote_types(kind, torch.float32)


def within(x: Tensor, kind: torch.dtype) -> Tensor:
    """`x` as `kind`; a finite number beyond its range is cut off there, and one that is not finite stays what it is."""
    if torch.promote_types(x.dtype, kind) == kind:
        return x.to(kind)
    top = torch.finfo(kind).max
    return torch.where(x.isfinite(), x.clamp(-top, top), x).to(kind)
