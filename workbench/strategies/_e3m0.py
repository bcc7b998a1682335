"""E3M0: four bits per element, one for the sign and three for a power of two; two elements per byte.

The format is the one that Streaming DiLoCo sends ("E3M0": no mantissa). How it is scaled and what stands for zero is
ours: each block of 256 elements has its largest magnitude s as a float32 scale, and an element becomes the nearest of
0, +-s 2^-6, +-s 2^-5, ..., +-s. So with n elements a payload has 4 ceil(n / 256) + ceil(n / 2) bytes, and

    |x - decode(encode(x))| <= max(|x| / 3, s / 128)

What was decoded is encoded to the same again. A block with a NaN or an infinity in it comes back as NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.rank import Rank, outlined

BLOCK = 256
_LEVELS = torch.tensor([0.0, *(2.0**k for k in range(-6, 1))])
_BOUNDS = (_LEVELS[:-1] + _LEVELS[1:]) / 2  # from there on the next level is the nearer one
_VALUES = torch.cat([_LEVELS, -_LEVELS])  # by code: bit 3 is the sign


def nbytes(n: int) -> int:
    """The bytes of n encoded elements."""
    return 4 * -(-n // BLOCK) + -(-n // 2)


@outlined(lambda x: x.new_empty((*x.shape[:-1], nbytes(x.shape[-1])), dtype=torch.uint8))
def encode(x: Tensor) -> Tensor:
    """(..., n) of any float -> (..., nbytes(n)) uint8: the blocks' scales, then the codes, first in the lower half."""
    n, blocks = x.shape[-1], -(-x.shape[-1] // BLOCK)
    cut = pad(x.float(), (0, blocks * BLOCK - n)).view(*x.shape[:-1], blocks, BLOCK)
    size = cut.abs()
    scale = size.amax(-1)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    share = size / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    level = torch.bucketize(share, _BOUNDS.to(x.device), right=True)
    code = level + 8 * ((cut < 0) & (level > 0))
    code = pad(code.flatten(-2)[..., :n].to(torch.uint8), (0, n % 2))
    return torch.cat([scale.view(torch.uint8), code[..., ::2] | code[..., 1::2] << 4], -1)


@outlined(lambda payload, n: payload.new_empty((*payload.shape[:-1], n), dtype=torch.float32))
def decode(payload: Tensor, n: int) -> Tensor:
    """(..., nbytes(n)) uint8 -> (..., n) float32."""
    blocks = -(-n // BLOCK)
    scale = payload[..., : 4 * blocks].clone(memory_format=torch.contiguous_format).view(torch.float32)
    packed = payload[..., 4 * blocks :]
    code = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :n]
    return _VALUES.to(payload.device)[code.long()] * scale.repeat_interleave(BLOCK, -1)[..., :n]


async def mean(rank: Rank, x: Tensor, name: str) -> Tensor:
    """(n,) -> (n,) float32: about the mean over ranks, the same bits on all of them, for 4 bits per element and way.

    Each rank adds up one of `size` chunks in float32 and tells all others what it found. Bytes sent per rank:
    2 (p-1) nbytes(ceil(n / p)), where an all-gather of everybody's codes would send (p-1) nbytes(n).
    """
    n, size = x.numel(), rank.size
    chunk = -(-n // size)
    got = await rank.all_to_all(encode(pad(x, (0, size * chunk - n)).view(size, chunk)), name)
    every = await rank.all_gather(encode(decode(got, chunk).sum(0) / size), name)
    return decode(every, chunk).flatten()[:n]
