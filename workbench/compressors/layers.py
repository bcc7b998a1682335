"""Layers: one compressor for chosen parameters, another for the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.compressors._base import Compressor
from workbench.compressors._split import by_part, split_momentum
from workbench.compressors.dense import Dense
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.compressors.top_k import TopK
from workbench.rank import Bucket, Memory, Part, Rank
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layers(Compressor):
    """Sends chosen parameters with one compressor, vectors and small ones with another.

        parameter -> `of`     if it has at least `smallest` elements, two dimensions or more, and `only` in its name
                  -> `rest`   otherwise

    Biases and normalisations are a few bytes and a short message each. So released codes such as DGC and PowerSGD send
    them whole. This wrapper does so for any 2 compressors. For several rules nest them: `rest` may be another Layers.

    Bytes are those of `of` for its parameters of a bucket, coded together. For the other parameters they are those of
    `rest`. A bucket with both takes 2 consecutive exchanges and is copied twice. `only` is a regular expression that is
    searched in the parameter's name, such as "weight" or "^blocks". All 3 rules are live. Error feedback goes outside:
    the bare name Layers means ErrorFeedback(of=Layers()), so that a parameter that changes sides keeps its residual.

    When to use it: with TopK, OneBit or other codes that act on a whole bucket. PowerSGD does not need it.

    Reference: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
    ICLR 2018, https://arxiv.org/abs/1712.01887, whose released code compresses what has more than one dimension
    """

    of: Compressor = knob(TopK(), doc="compressor of the chosen parameters")
    rest: Compressor = knob(Dense(), doc="compressor of the other parameters")
    smallest: int = knob(1024, 0, 10**9, unit="elements", doc="smallest number of elements of a chosen parameter")
    vectors: bool = knob(False, doc="also choose vectors (biases, normalisations)")
    only: str = knob("", doc="regular expression that a chosen parameter's name contains; empty: any name")

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def refuses(self) -> str | None:
        try:
            re.compile(self.only)
        except re.error as wrong:
            return (
                f"only={self.only!r}: is not a regular expression ({wrong}); use a part of the parameters' names, "
                f"such as 'weight', or '' for all parameters"
            )
        return split_momentum(self.of, self.rest)

    def chosen(self, part: Part) -> bool:
        """Whether `of` sends this parameter."""
        large = part.stop - part.start >= self.smallest
        return large and (self.vectors or len(part.shape) > 1) and re.search(self.only, part.name) is not None

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        chosen = [self.of if self.chosen(part) else self.rest for part in bucket.parts]
        return await by_part(chosen, rank, bucket, memory)
