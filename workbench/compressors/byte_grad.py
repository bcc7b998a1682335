"""ByteGrad: gradients as codes of 8, 4 or 2 bits between a chunk's minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workbench.compressors._minmax import quantised, restored
from workbench.compressors._two_hop import Coded
from workbench.rank import Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class ByteGrad(Coded):
    """Sends every element in two hops, as an 8-, 4- or 2-bit code between its block's smallest and largest.

        code = round((x - min) / step),   step = (max - min) / (2^bits - 1)

    Rank j decodes chunk j of every rank and adds up in fp32. It codes the sum again and sends it to all ranks. An
    element of the result is off by at most half a step of each rank's code, and half a step of the sum's. A rank sends
    2 (p-1) (m bits / 8 + 8) bytes for chunks of m = n / p elements. For any p, that is 1/4 to 1/16 of a dense
    all-reduce. With `block` = B, 8 bytes for every B elements instead of every chunk. Not linear, no memory. A block
    with a non-finite number becomes NaN.

    When to use it: a slow but not very slow network, without tuning. With 8 bits and one scale per chunk it is Bagua's
    ByteGrad and trains like Dense. If magnitudes within a chunk differ much, smaller blocks keep the small ones. With 4
    bits use ErrorFeedback(of=ByteGrad(bits=4)). With 2 bits the error is about as large as the gradient and needs error
    feedback. This codec rounds x - min. Bagua's rounds x, so its codes overflow if the offset is large and the range
    small.

    `stochastic` rounds up or down at random in both hops, so the result is unbiased. The error is sqrt(2) times as
    large if a block's numbers are spread evenly between codes. Rounding to the nearest may repeat the same error in
    every step. Error feedback corrects that without the larger error, so do not combine the two.

    Under ErrorFeedback the unsent part must shrink. A step is at most 2 / (2^bits - 1) of the block's largest
    magnitude. Rounding errs by up to half a step to the nearest code, and by up to a step at random. The second hop
    adds as much again, because codes stay within their input's range. Two bits at random give 4/3, which is refused.

    Reference: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021,
    https://arxiv.org/abs/2107.01499; codes in blocks: Markov et al., "CGX: Adaptive System Support for
    Communication-Efficient Deep Learning", Middleware 2022, https://arxiv.org/abs/2111.08617
    """

    bits: int = knob(8, choices=(8, 4, 2), doc="bits of a code")
    stochastic: bool = knob(False, doc="round at random, so that the mean is right, instead of to the nearest code")

    scalars: ClassVar[int] = 2

    @property
    def width(self) -> int:
        return self.bits

    @property
    def strays(self) -> float:
        return 2 * (2 if self.stochastic else 1) / (2**self.bits - 1)

    def refuses_feedback(self) -> str | None:
        if self.strays < 1:
            return None
        return (
            f"of=ByteGrad(bits={self.bits}, stochastic={self.stochastic}): its error can be {self.strays:.3g} times "
            f"as long as its input, so it would grow under error feedback; use it without error feedback, or set "
            f"stochastic=False or bits=4"
        )

    def quantise(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        return quantised(x, self.bits, memory.generator(x.device) if self.stochastic else None)

    def restore(self, codes: Tensor, scales: Tensor, memory: Memory) -> Tensor:
        return restored(codes, scales)
