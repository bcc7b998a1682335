"""Stochastic rounding to whole numbers of at most 8 bits: unbiased and fast.

The plain expression floor(x * scale + rand) is slow. A sequential generator draws each random number, and it passes
through main memory several times. On the CPU this module works in blocks that fit the cache. Only the first block's
random numbers come from the rank's own generator. Each later block takes one multiplication and one addition per
number: a linear congruential generator per place, modulo 2^32.

Sums are multiples of 2^-23, so a whole number never moves. In float32, floor(255 + 0.99999997) would be 256. In a byte
this becomes 0.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from workbench.rank import outlined

BLOCK, LARGE = 2**15, 2**20  # elements per block, doubled for a vector of LARGE elements
FRACTION_BITS = 23  # bits of the fraction
FACTOR, TERM = 1664525, 1013904223  # Knuth and H. W. Lewis; only the upper bits are used, which are good


@outlined(lambda x, *_, **__: x.new_empty(x.shape, dtype=torch.uint8))
def dithered(x: Tensor, generator: Generator | None, scale: float = 1.0, top: int = 255) -> Tensor:
    """Returns floor(scale * x + u) as uint8 in the shape of `x`. u in `[0, 1)` is uniform and independent per element.

    So its mean is scale * x, to 2^-24 and the rounding of float32. scale * x should be in `[0, top]` with top <= 255.
    Values beyond by rounding are clamped; non-finite values become any code up to `top`. A generator in the same state
    gives the same codes.
    """
    if x.device.type != "cpu":
        return plain(x, generator, scale, top)
    flat = x.reshape(-1).float()
    out = torch.empty(flat.shape, dtype=torch.uint8)
    block = BLOCK if flat.numel() < LARGE else 2 * BLOCK
    n = min(flat.numel(), block)
    real, whole = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.int32)
    dither = real.view(torch.int32)  # shares real's storage, to use less cache
    state = torch.empty(-(-n // 2), dtype=torch.int64)
    state = state.random_(-(2**63), None, generator=generator).view(torch.int32)[:n]
    middle, term = (
        torch.tensor(2 ** (FRACTION_BITS - 1) + 0.5, dtype=torch.float32),
        torch.tensor(TERM, dtype=torch.int32),
    )
    low, high = 2 ** (FRACTION_BITS - 1), top * 2**FRACTION_BITS + 2 ** (FRACTION_BITS - 1)
    for part, codes in zip(flat.split(block), out.split(block), strict=True):
        if (m := part.numel()) < n:
            real, whole, dither, state = real[:m], whole[:m], dither[:m], state[:m]
        torch.add(middle, part, alpha=scale * 2**FRACTION_BITS, out=real)
        whole.copy_(real).clamp_(low, high)
        torch.add(term, state, alpha=FACTOR, out=state)
        torch.bitwise_right_shift(state, 32 - FRACTION_BITS, out=dither)  # from -2^22 to 2^22 - 1; `middle` compensates
        codes.copy_(whole.add_(dither).bitwise_right_shift_(FRACTION_BITS))
    return out.view(x.shape)


def plain(x: Tensor, generator: Generator | None, scale: float, top: int) -> Tensor:
    """Computes `dithered` by the plain expression, on any device."""
    y = (x.float() * scale).nan_to_num_(0.0).clamp_(0, top)
    low = y.floor()
    return low.add_(torch.rand(y.shape, generator=generator, device=y.device) < y - low).to(torch.uint8)
