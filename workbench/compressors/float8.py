"""Float8: gradients as 8-bit floats, scaled to the largest of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from workbench.compressors._stochastic import dithered
from workbench.compressors._two_hop import Coded
from workbench.rank import Memory
from workbench.settings import knob


class _Format(NamedTuple):
    dtype: torch.dtype
    largest: float
    fraction: int  # bits after the point of 1.xxx
    lowest: int  # exponent of the smallest normal number


_FORMATS = {
    "e4m3": _Format(torch.float8_e4m3fn, 448.0, 3, -6),
    "e5m2": _Format(torch.float8_e5m2, 57344.0, 2, -14),
}


@dataclass(frozen=True, kw_only=True)
class Float8(Coded):
    """Sends 8-bit floats in two hops. A block's largest element becomes the format's maximum.

        code = float8(x / step),   step = max |x| / M,   M = 448 (e4m3) or 57344 (e5m2)

    8-bit floats cannot be added while they travel. So rank j decodes chunk j of every rank and adds up in fp32. It
    codes the sum again and sends it to all ranks. Bytes sent per rank: 2 (p-1) (m + 4 k) for chunks of m = n / p
    elements in k blocks: half of Cast's, for any p. With e4m3 each hop errs by at most 1/16 of an element, down to
    1/29000 of its block's largest. With e5m2 it errs by 1/8, down to `1/940,000,000`. A block with a non-finite number
    becomes NaN.

    ByteGrad's codes are equal steps from a block's smallest number to its largest. 8-bit floats keep the relative
    accuracy of small elements. `stochastic` rounds up or down at random in both hops, so the result is unbiased.

    When to use it: instead of Cast, if half its bytes justify a second hop and gradients differ widely in magnitude.
    e4m3 is finer. e5m2 has more range. Torch's cast to e5m2 turns values beyond the format into infinities, so x / step
    is clamped to M first. Codes travel as bytes, because gloo takes no 8-bit floats.

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433; the two
    hops are those of torchft's allreduce_quantized, https://github.com/meta-pytorch/torchft
    """

    to: str = knob("e4m3", choices=("e4m3", "e5m2"), doc="the 8-bit float that is sent")
    block: int = knob(
        256, choices=(0, 64, 256, 1024), unit="elements", doc="elements that share a scale; 0: a whole chunk"
    )
    stochastic: bool = knob(False, doc="round at random, so that the mean is right, instead of to the nearest number")

    scalars: ClassVar[int] = 1
    kind: ClassVar[str] = "casts"

    @property
    def width(self) -> int:
        return 8

    def quantise(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        form = _FORMATS[self.to]
        step = x.abs().amax(-1, keepdim=True) / form.largest
        scaled = (x / step).nan_to_num_(0.0).clamp_(-form.largest, form.largest)
        if self.stochastic:
            scaled = _at_random(scaled, form, memory.generator(x.device))
        return scaled.to(form.dtype).view(torch.uint8), torch.where(step.isfinite(), step, torch.nan)

    def restore(self, codes: Tensor, scales: Tensor, memory: Memory) -> Tensor:
        return codes.view(_FORMATS[self.to].dtype).float().mul_(scales)


def _at_random(x: Tensor, form: _Format, generator: Generator | None) -> Tensor:
    """Rounds `x` up or down to numbers of the format, with mean `x`. |x| <= its largest."""
    exponent = ((x.view(torch.int32) >> 23) & 255) - 127
    unit = ((exponent.clamp(min=form.lowest) + 127 - form.fraction) << 23).view(torch.float32)
    steps = dithered(x.abs() / unit, generator, top=2 ** (form.fraction + 1))
    return (steps * unit).copysign_(x)
