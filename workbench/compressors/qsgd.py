"""QSGD: stochastic rounding to equally spaced levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._levels import Levels
from workbench.rank import Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class QSGD(Levels):
    """Sends every element as one of a few equally spaced levels, drawn so that its mean is kept.

        C(x) = N sign(x) xi / s,   xi = floor(s |x| / N), or one more with probability s |x| / N - floor(s |x| / N)

    N is the norm of the element's block and s = 2^(bits-1) - 1. So the 2 s + 1 levels from -N to N fit their bits.
    Bytes sent per rank: (p-1) (n bits / 8 + 4 ceil(n / block)). In 2 hops they are 2 (p-1)/p times one message.
    Unbiased and without memory: E |C(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2 for blocks of d elements and the L2
    norm. Any knob may be set at any step.

    The theory uses the L2 norm, which leaves most codes at zero and makes the variance large. The default here is the
    maximum norm, as usual in practice (QSGDinf). Codes have a fixed width. The paper's Elias codes are shorter if
    nearly all codes are zero, as with L2, large blocks or few bits. But their length differs between ranks, and they
    are slow.

    When to use it: few bits without a residual. With 8 bits the result hardly differs from Dense. It needs no error
    feedback. That diverges if the error is longer than x. It is refused then: with 2 bits, or the L2 norm and sqrt(d)
    >= 2 s.

    Reference: Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization
    and Encoding", NeurIPS 2017, https://arxiv.org/abs/1610.02132
    """

    norm: str = knob("max", choices=("max", "l2"), doc="the norm that elements are divided by")

    even: ClassVar[bool] = True
    starter: ClassVar[bool] = True

    def levels(self, memory: Memory) -> Tensor:
        return torch.linspace(-1.0, 1.0, 2**self.bits - 1)
