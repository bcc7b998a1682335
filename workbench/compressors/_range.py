"""Converts a wide number to a narrow type; finite numbers stay finite."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(kind: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums and residuals of numbers in `kind`: at least float32."""
    return torch.promote_types(kind, torch.float32)


def within(x: Tensor, kind: torch.dtype) -> Tensor:
    """`x` as `kind`: clamps finite numbers to its range and keeps non-finite ones."""
    if torch.promote_types(x.dtype, kind) == kind:
        return x.to(kind)
    top = torch.finfo(kind).max
    return torch.where(x.isfinite(), x.clamp(-top, top), x).to(kind)
