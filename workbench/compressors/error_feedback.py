"""Error feedback: what was not sent is remembered and added next time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from workbench.compressors._base import Compressor, inside
from workbench.compressors.dense import Dense
from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Rank

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Adds to each gradient what earlier steps left unsent, and remembers what this one leaves.

        x = grad + residual;   out = sum over ranks of C(x);   residual <- x - C(x)

    So nothing is lost, only late: everything sent plus what is left equals the sum of all gradients,
    across any live change of ratio, bucket size or compressor. Costs one value per element of memory and two
    passes over the bucket. A non-finite gradient is passed on but not remembered.

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019, https://arxiv.org/abs/1901.09847
    """

    of: Compressor = knob(Dense(), doc="the compressor whose error is fed back")

    slot: ClassVar[str] = "residual"
    owes: ClassVar[str] = slot

    def whole(self) -> Compressor:
        return ErrorFeedback(of=Dense())

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if any(c.owes for c in inside(self.of)):  # what is fed back within cannot be fed back twice
            return await self.of.reduce(rank, bucket, memory)
        residual = memory.flat(self.slot, bucket)
        x = residual.add_(bucket.data)  # the residual's own storage holds x until the contribution is known
        bucket.data.copy_(x)
        own = await self.of.reduce(rank, bucket, memory)
        if own is None:
            residual.zero_()
        else:
            residual.sub_(own).nan_to_num_(0.0, 0.0, 0.0)
        return None
