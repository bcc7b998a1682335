"""Error feedback: what was not sent is remembered and added next time."""

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
    """Adds to each gradient what earlier steps left unsent, and remembers what this one leaves.

        x = grad + residual;   out = sum over ranks of C(x);   residual <- x - C(x)

    C(x) is what this rank itself put into `out`, so nothing is lost, only late: everything sent plus what is left
    equals the sum of all gradients, across any live change of ratio, bucket size or compressor. Costs one value per
    element of memory, at least fp32 (a residual in bf16 would swallow what is 500 times smaller than itself), and a few
    passes over the bucket. What does not fit into a narrow bucket's range waits in the residual. There is one residual:
    error feedback within what is wrapped, however deep, is left out, so nothing is fed back twice.

    Where the result is not finite nothing was delivered: there the residual stays what it was, on all ranks, and that
    step's gradient is disregarded. Sent uncompressed, residuals are in the units of gradients, not of updates: after
    a drop of the learning rate what is still owed counts at the new rate, as all gradients from then on do.

    What is left unsent stays bounded where C is a contraction in some norm, E ||C(x) - x|| <= a ||x|| with a < 1 for
    every x: then ||residual|| <= a / (1 - a) times the longest gradient. `Compressor.strays` is that a, from the
    compressor's knobs; one for which it is 1 or more, or unbounded, is refused, with what would do.

    When a compressor takes over that feeds nothing back, the one that is left says by `off` what becomes of the rest.
    "flush": one uncompressed step sends it all, beside its own gradient. "bleed": `over` uncompressed steps send it in
    equal shares, for a residual much longer than a gradient makes a long step. "drop": it is forgotten. The record's
    Mark "residual" says how much it was; where exchanges change their meaning (gradients, displacements, moments) it is
    always dropped.

    When to use it: around every biased compressor; the bare names of those bring it along. An unbiased one needs none.
    What is sent late does not count in full through Adam's first moment: AdamW(beta1=0) or SGD suit it better
    (docs/compression.md).

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019, https://arxiv.org/abs/1901.09847
    """

    of: Compressor = knob(Dense(), doc="the compressor whose error is fed back")
    off: str = knob("flush", choices=("flush", "bleed", "drop"), doc="what becomes of the residual at the end")
    over: int = knob(10, 2, 10_000, unit="steps", log=True, doc="bleed: steps in which the residual is sent")

    residual: ClassVar[str] = "residual"

    def whole(self) -> Compressor:
        return ErrorFeedback(of=Dense())

    def refuses(self) -> str | None:
        return next(filter(None, (c.refuses_feedback() for c in inside(self.of))), None)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        of = bare(self.of)
        if any(c.residual for c in inside(of)):  # it feeds back by itself
            return await of.reduce(rank, bucket, memory)
        residual = memory.flat(self.residual, bucket, wide(bucket.data.dtype))
        x = bucket.data + residual
        rounded = put(bucket, x)
        own = await of.reduce_owing(rank, bucket, memory)
        memory.keep(self.residual, bucket, unsent(residual, x, rounded if own is None else own, bucket.data))
        return None


def bare(compressor: Compressor) -> Compressor:
    """`compressor` without the error feedback in it, however deep."""
    if isinstance(compressor, ErrorFeedback):
        return bare(compressor.of)
    held = {f.name: getattr(compressor, f.name) for f in fields(compressor)}
    inner = {name: bare(value) for name, value in held.items() if isinstance(value, Compressor)}
    return replace(compressor, **inner) if inner else compressor


def put(bucket: Bucket, x: Tensor) -> Tensor | None:
    """`x` becomes the bucket's data; returns what was made of it if it is wider and had to be rounded.

    A finite gradient stays finite: what is beyond the bucket's range is cut off, and so is left unsent.
    """
    data = bucket.data
    if x.dtype == data.dtype:
        data.copy_(x)
        return None
    data.copy_(within(x, data.dtype))
    return data.clone()


def unsent(residual: Tensor, x: Tensor, own: Tensor | Owed | None, out: Tensor) -> Tensor:
    """x - own (None: all of x was sent) in the storage of `x`; what `residual` is where `x` or `out` is not finite."""
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
