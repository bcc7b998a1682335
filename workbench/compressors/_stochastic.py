"""Rounding at random to whole numbers of at most 8 bits: right on average, and cheap.

The plain expression, floor(x * scale + rand), spends most of its time on a random number per element from a generator
that gives one after the other, and on passes through main memory. On the CPU the work is done here in blocks that
stay in the cache; a block's random numbers follow from the last block's by one multiplication and one addition each (a
linear congruential generator in every place, modulo 2^32), and only the first come from the rank's own generator.

Sums are made in whole numbers of 2^-23, so a number that is whole already is never moved, not even the largest, which
floor(255 + 0.99999997) in float32 turns into 256 and a byte into 0.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from workbench.rank import outlined

BLOCK, LARGE = 2**15, 2**20  # elements worked on at once; twice as many of a vector this long, whose first are few
POINT = 23  # bits behind the point
FACTOR, TERM = 1664525, 1013904223  # Knuth and H. W. Lewis; the upper bits are good, and only these are used


@outlined(lambda x, *_, **__: x.new_empty(x.shape, dtype=torch.uint8))
def dithered(x: Tensor, generator: Generator | None, scale: float = 1.0, top: int = 255) -> Tensor:
    """floor(scale * x + u) as uint8 in the shape of `x`, with u uniform in [0, 1) for each element by itself.

    So its mean is scale * x, to 2^-24 and the rounding of float32. scale * x belongs in [0, top], top <= 255: what
    lies beyond it by rounding is cut off; what is not finite becomes any code up to `top`. A generator in the same
    state gives the same codes.
    """
    if x.device.type != "cpu":
        return plain(x, generator, scale, top)
    flat = x.reshape(-1).float()
    out = torch.empty(flat.shape, dtype=torch.uint8)
    block = BLOCK if flat.numel() < LARGE else 2 * BLOCK
    n = min(flat.numel(), block)
    real, whole = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.int32)
    dither = real.view(torch.int32)  # two uses, one place: less cache
    state = torch.empty(-(-n // 2), dtype=torch.int64)
    state = state.random_(-(2**63), None, generator=generator).view(torch.int32)[:n]
    middle, term = torch.tensor(2 ** (POINT - 1) + 0.5, dtype=torch.float32), torch.tensor(TERM, dtype=torch.int32)
    low, high = 2 ** (POINT - 1), top * 2**POINT + 2 ** (POINT - 1)
    for part, codes in zip(flat.split(block), out.split(block), strict=True):
        if (m := part.numel()) < n:
            real, whole, dither, state = real[:m], whole[:m], dither[:m], state[:m]
        torch.add(middle, part, alpha=scale * 2**POINT, out=real)
        whole.copy_(real).clamp_(low, high)
        torch.add(term, state, alpha=FACTOR, out=state)
        torch.bitwise_right_shift(state, 32 - POINT, out=dither)  # from -2^22 to 2^22 - 1: `middle` makes up for it
        codes.copy_(whole.add_(dither).bitwise_right_shift_(POINT))
    return out.view(x.shape)


def plain(x: Tensor, generator: Generator | None, scale: float, top: int) -> Tensor:
    """The same in a few words, on any device."""
    y = (x.float() * scale).nan_to_num_(0.0).clamp_(0, top)
    low = y.floor()
    return low.add_(torch.rand(y.shape, generator=generator, device=y.device) < y - low).to(torch.uint8)
