"""How long a vector is that no rank has, as the mean of all ranks' residuals: from a few numbers of each."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SIGNS, WIDTH = 32, 127  # a width that divides no layer's usual one: what repeats in a matrix falls on different numbers


def sketch(x: Tensor, name: str) -> Tensor:
    """(n,) -> (SIGNS * WIDTH,) float32: linear in x, the same map on every rank, and about as long as x.

    Rows of WIDTH elements are added up with random signs, SIGNS times. The square of the length is right on average
    and off by at most sqrt(2 / SIGNS) of itself (one standard deviation), usually by a tenth of that; exact for up to
    WIDTH elements. The sum of all ranks' sketches is the sketch of the sum.
    """
    rows = -(-x.numel() // WIDTH)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, (SIGNS, rows), generator=generator).float().mul_(2).sub_(1).to(x.device)
    padded = torch.nn.functional.pad(x.float(), (0, rows * WIDTH - x.numel()))
    return (signs @ padded.view(rows, WIDTH)).view(-1).div_(SIGNS**0.5)
