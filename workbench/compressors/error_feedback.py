"""Error feedback: keeps the unsent part and adds it to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor, Owed, inside
from workbench.compressors._range import wide, within
from workbench.compressors.dense import Dense
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Adds to each gradient the unsent part of earlier steps, and keeps the unsent part of this one.

        x = grad + residual;   out = sum over ranks of C(x);   residual <- x - C(x)

    C(x) is this rank's own contribution to `out`. Nothing is lost, only late. Everything sent plus the residuals equals
    the sum of all gradients. This holds across any live change of ratio, bucket size or compressor. It takes a few
    passes over the bucket and one value of memory per element. The value is at least fp32, because a bf16 residual
    would lose additions 500 times smaller than itself. Values beyond a narrow bucket's range wait in the residual. It
    ignores error feedback inside the wrapped compressor, however deep, so that nothing is fed back twice.

    If a result is not finite, the residual stays the same on all ranks, and that step's gradient is ignored. Residuals
    sent uncompressed are in the units of gradients, not of updates. After a drop of the learning rate they count at the
    new rate, like all later gradients.

    The residual stays bounded if C is a contraction in some norm: E ||C(x) - x|| <= a ||x|| with a < 1 for every x.
    Then ||residual|| <= a / (1 - a) times the longest gradient. `Compressor.strays` gives a from the compressor's
    knobs. A compressor with a >= 1, or without a bound, is refused with a remedy.

    If a compressor without error feedback takes over, `off` decides about the residual. "flush": one uncompressed step
    sends all of it with its own gradient. "bleed": `over` uncompressed steps send it in equal shares, because a
    residual much longer than a gradient makes a long step. "drop": it is deleted. The Mark "residual" records its size.
    If exchanges change their meaning, the residual is always dropped. Meanings are gradients, displacements and
    moments.

    When to use it: around every biased compressor; their bare names include it. Unbiased ones do not need it. Adam's
    first moment reduces late parts, so AdamW(beta1=0) or SGD suit it better (docs/project/compression.md).

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019, https://arxiv.org/abs/1901.09847
    """

    of: Compressor = knob(Dense(), doc="the compressor whose error is fed back")
    off: str = knob(
        "flush", choices=("flush", "bleed", "drop"), doc="what happens to the residual when the compressor is removed"
    )
    over: int = knob(10, 2, 10_000, unit="steps", log=True, doc="bleed: number of steps that send the residual")

    residual: ClassVar[str] = "residual"

    def whole(self) -> Compressor:
        return ErrorFeedback(of=Dense())

    def refuses(self) -> str | None:
        return next(filter(None, (c.refuses_feedback() for c in inside(self.of))), None)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        of = without_feedback(self.of)
        if any(c.residual for c in inside(of)):  # it has its own residual
            return await of.reduce(rank, bucket, memory)
        residual = memory.flat(self.residual, bucket, wide(bucket.data.dtype))
        x = bucket.data + residual
        rounded = write_clamped(bucket, x)
        own = await of.reduce_owing(rank, bucket, memory)
        memory.keep(self.residual, bucket, unsent(residual, x, rounded if own is None else own, bucket.data))
        return None


def without_feedback(compressor: Compressor) -> Compressor:
    """Returns `compressor` without the error feedback in it, however deep."""
    if isinstance(compressor, ErrorFeedback):
        return without_feedback(compressor.of)
    held = {f.name: getattr(compressor, f.name) for f in fields(compressor)}
    inner = {name: without_feedback(value) for name, value in held.items() if isinstance(value, Compressor)}
    return replace(compressor, **inner) if inner else compressor


def write_clamped(bucket: Bucket, x: Tensor) -> Tensor | None:
    """Writes `x` into the bucket's data. Returns the rounded data if `x` is wider, else None.

    Finite gradients stay finite: values beyond the bucket's range are clamped, and the rest is left unsent.
    """
    data = bucket.data
    if x.dtype == data.dtype:
        data.copy_(x)
        return None
    data.copy_(within(x, data.dtype))
    return data.clone()


def unsent(residual: Tensor, x: Tensor, own: Tensor | Owed | None, out: Tensor) -> Tensor:
    """Returns x - own (None: all was sent) in the storage of `x`; `residual` where `x` or `out` is not finite."""
    good = None if _finite(x, own, out) else x.isfinite() & out.isfinite()
    if own is None:
        x.zero_()
    elif isinstance(own, Tensor):
        x.sub_(own)
    else:
        own.leave(x)
    return x if good is None else torch.where(good & x.isfinite(), x, residual)


@outlined(lambda *_: True)
def _finite(x: Tensor, own: Tensor | Owed | None, out: Tensor) -> bool:
    if own is not None and not isinstance(own, Tensor) and own.finite():
        return True
    return bool((x.sum() + out.sum(dtype=x.dtype)).isfinite())
