"""E3M0: 4 bits per element, a sign and a power of 2. A byte holds 2 elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.compressors._base import Codec, Payload
from workbench.compressors._range import within
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import outlined

BLOCK_ELEMENTS = 256
_LEVELS = torch.tensor([0.0, *(2.0**k for k in range(-6, 1))])
_BOUNDS = (_LEVELS[:-1] + _LEVELS[1:]) / 2  # from this bound on the next level is nearer
_VALUES = torch.cat([_LEVELS, -_LEVELS])  # by code: bit 3 is the sign


def nbytes(n: int) -> int:
    """Returns the bytes of n encoded elements."""
    return 4 * -(-n // BLOCK_ELEMENTS) + -(-n // 2)


@dataclass(frozen=True, kw_only=True)
class E3M0(Codec):
    """Sends every element as its sign and a power of two: three bits of exponent, none of mantissa.

        C(x) = the nearest of 0, +-s 2^-6, +-s 2^-5, ..., +-s;   s the largest magnitude of 256 elements, as float32
        |x - C(x)| <= max(|x| / 3, s / 128),   so ||x - C(x)||^2 <= (1/9 + 1/64) ||x||^2

    Bytes sent per rank for n elements: (p-1) (ceil(n / 2) + 4 ceil(n / 256)), to all ranks. Encoding a decoded tensor
    gives the same codes. A block with a non-finite number becomes NaN. Biased, so it wants error feedback: the bare
    name E3M0 means ErrorFeedback(of=E3M0()).

    Streaming DiLoCo sends this format. Its scale and its code of zero could not be established and are ours.
    StreamingDiLoCo uses this codec by itself, in 2 hops and without error feedback.

    When to use it: for magnitudes that differ by orders. Equally spaced levels such as QSGD's lose the small ones.

    Reference: Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
    2025, https://arxiv.org/abs/2501.18512
    """

    contraction: ClassVar[bool] = True
    kind: ClassVar[str] = "quantised"

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    @property
    def strays(self) -> float:
        return float((1 / 9 + 1 / 64) ** 0.5)

    @outlined(lambda self, x: (x.new_empty(nbytes(x.numel()), dtype=torch.uint8),))
    def encode(self, x: Tensor) -> Payload:
        """Returns the blocks' scales, then the codes. A byte holds 2 codes, the first in the lower half."""
        n, blocks = x.numel(), -(-x.numel() // BLOCK_ELEMENTS)
        cut = pad(x.flatten().float(), (0, blocks * BLOCK_ELEMENTS - n)).view(blocks, BLOCK_ELEMENTS)
        size = cut.abs()
        scale = size.amax(-1)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        share = size / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
        level = torch.bucketize(share, _BOUNDS.to(x.device), right=True)
        code = level + 8 * ((cut < 0) & (level > 0))
        code = pad(code.flatten()[:n].to(torch.uint8), (0, n % 2))
        return (torch.cat([scale.view(torch.uint8), code[::2] | code[1::2] << 4]),)

    @outlined(lambda self, payload, like: like.new_empty(like.shape))
    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        n, head = like.numel(), 4 * -(-like.numel() // BLOCK_ELEMENTS)
        scale = payload[0][:head].clone().view(torch.float32)
        codes = payload[0][head:]
        code = torch.stack([codes & 15, codes >> 4], -1).flatten()[:n]
        out = _VALUES.to(codes.device)[code.long()] * scale.repeat_interleave(BLOCK_ELEMENTS)[:n]
        return within(out, like.dtype).view(like.shape)
