"""The min-max codec: a block of numbers as small integers, with its minimum and step."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from workbench.compressors._stochastic import dithered


def quantised(x: Tensor, bits: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of `(..., n)` float32, a block per row. Codes: `(..., n)` uint8 from 0 to 2^bits - 1.
    Scales: `(..., 2)`, min and step.

    code = round((x - min) / step) and step = (max - min) / (2^bits - 1). So codes stay in range for any offset. A block
    of equal numbers has step 0 and is restored exactly. A block with a non-finite number, or a range beyond float32,
    gets a non-finite step and codes 0. It is restored as NaN throughout.

    `generator` rounds up or down at random, so that the mean is x.
    """
    top = 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / top
    places = ((x - low) / step).nan_to_num_(0.0, 0.0, 0.0)
    codes = dithered(places, generator, top=top) if generator else places.round_().clamp_(0, top).to(torch.uint8)
    return codes, torch.cat([low, step], -1)


def restored(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns `(..., n)` float32 from the output of `quantised`: min + code * step, within half a step of the input."""
    low, step = scales.split(1, -1)
    return codes.float().mul_(step).add_(low)
