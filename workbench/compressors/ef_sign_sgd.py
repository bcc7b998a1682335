"""EFSignSGD: the sign of every element and one magnitude, gathered in one hop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from workbench.compressors._two_hop import Coded
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.compressors.one_bit import OneBit
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob

_SIGNS = OneBit(scale="mean")


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(Coded):
    """Sends every element's sign and each block's mean magnitude; every rank gathers all.

        C(x) = (||x||_1 / n) * sign(x), sign(0) = +1;   out = sum over ranks of C(x_i)

    Bytes sent per rank: (p-1) (n / 8 + 4). With `block` = B, 4 bytes for every B elements instead of every bucket. A
    contraction: ||x - C(x)||^2 = (1 - phi) ||x||^2 with phi = ||x||_1^2 / (n ||x||^2). phi is the share of x in its
    signs: 2/pi for normal numbers and 1/n at worst. It needs error feedback: the bare name EFSignSGD means
    ErrorFeedback(of=EFSignSGD()). A block with a non-finite number becomes NaN.

    OneBit sends the same signs in 2 hops, which takes 2 (p-1)/p * n / 8 bytes. It codes the sum to one bit again. Here
    the sum is exact and the residual smaller, for p / 2 times the bytes. With 2 ranks the bytes are equal.

    When to use it: very slow networks and few ranks, under plain SGD. It sends less than a dense fp32 all-reduce while
    p < 64, and less than one of 16 bits while p < 32. The residual has the gradient's units, so the learning rate may
    change.

    Reference: Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", ICML 2019, https://arxiv.org/abs/1901.09847
    """

    block: int = knob(
        0, choices=(0, 64, 256, 1024), unit="elements", doc="elements that share a scale; 0: a whole bucket"
    )

    contraction: ClassVar[bool] = True
    scalars: ClassVar[int] = 1

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    @property
    def width(self) -> int:
        return 1

    def quantise(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        return _SIGNS.quantise(x, memory)

    def restore(self, codes: Tensor, scales: Tensor, memory: Memory) -> Tensor:
        return _SIGNS.restore(codes, scales, memory)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        return await self.gathered(rank, bucket, memory)
