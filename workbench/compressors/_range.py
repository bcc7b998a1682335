"""Converts a wide number to a narrow type; finite numbers stay finite."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(kind: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums and residuals of numbers in `kind`: at least float32."""
    return torch.promote_types(kind, torch.float32)


def deliver(total: Tensor, x: Tensor, own: Tensor, size: int) -> Tensor:
    """Writes a sum over `size` ranks into `x`. Returns a rank's contribution to what `x` then holds.

    An `x` of 16 bits rounds and clamps the sum. Each rank counts 1/size of the lost part as not sent. So all
    contributions add up to `x`, and error feedback keeps the lost part.

    total, own: `(n,)`: the sum in `wide` of the dtype of `x`, and this rank's summand
    """
    if total.dtype == x.dtype:
        if total is not x:
            x.copy_(total)
        return own
    x.copy_(within(total, x.dtype))
    lost = torch.where(x.isfinite(), total - x, 0.0)
    return own.to(wide(x.dtype)).sub(lost, alpha=1 / size)


def within(x: Tensor, kind: torch.dtype) -> Tensor:
    """Returns `x` as `kind`; clamps finite numbers to its range and keeps non-finite ones."""
    if torch.promote_types(x.dtype, kind) == kind:
        return x.to(kind)
    top = torch.finfo(kind).max
    return torch.where(x.isfinite(), x.clamp(-top, top), x).to(kind)
