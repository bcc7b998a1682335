"""Error feedback: what was not sent is remembered and added next time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
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
    passes over the bucket. A non-finite gradient is passed on but not remembered. There is one residual: error feedback
    within what is wrapped, however deep, is left out, so nothing is fed back twice.

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019, https://arxiv.org/abs/1901.09847
    """

    of: Compressor = knob(Dense(), doc="the compressor whose error is fed back")

    slot: ClassVar[str] = "residual"

    def refuses(self) -> str | None:
        return next(filter(None, (c.refuses_feedback() for c in inside(self.of))), None)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        residual = memory.flat(self.slot, bucket)
        x = residual.add_(bucket.data)  # the residual's own storage holds x until the contribution is known
        bucket.data.copy_(x)
        own = await bare(self.of).reduce(rank, bucket, memory)
        if own is None:
            residual.zero_()
        else:
            residual.sub_(own).nan_to_num_(0.0, 0.0, 0.0)
        return None


def bare(compressor: Compressor) -> Compressor:
    """`compressor` without the error feedback in it, however deep."""
    if isinstance(compressor, ErrorFeedback):
        return bare(compressor.of)
    held = {f.name: getattr(compressor, f.name) for f in fields(compressor)}
    inner = {name: bare(value) for name, value in held.items() if isinstance(value, Compressor)}
    return replace(compressor, **inner) if inner else compressor
