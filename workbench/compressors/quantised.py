"""Quantised: encodes one codec's output again with another codec of few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.compressors._base import Coder, Compressor, Payload, all_told
from workbench.compressors._levels import Levels, worst
from workbench.compressors.error_feedback import ErrorFeedback, without_feedback
from workbench.compressors.qsgd import QSGD
from workbench.compressors.top_k import TopK
from workbench.rank import Bucket, Memory, Rank, sizes_of
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Quantised(Compressor):
    """Composes 2 codecs: `by` encodes the numbers that `of` would send.

        C(x) = Q(S(x)), S = `of`, Q = `by`;   with `scaled`  C(x) = Q(S(x)) / (1 + b)

    b bounds Q's squared error: E |Q(y) - y|^2 <= b |y|^2. For QSGD with blocks of d elements and s = 2^(bits-1) - 1 let
    q = sqrt(d) / s. Then b is q^2 / 4 if q < 2, else q - 1. Under TopK with k of n elements C is a contraction if b <
    1: |x - C(x)|^2 <= (1 - (1 - b) k / n) |x|^2 on average. With `scaled` it is one for any b: (1 - k / (n (1 + b)))
    |x|^2. So it wants error feedback: the bare name Quantised means ErrorFeedback(of=Quantised()). Without `scaled`, b
    of 1 or more is refused.

    Bytes sent per rank for k kept elements, with the default codecs: (p-1) (4 k + k bits / 8 + 4 ceil(k / block)).
    These are indices, codes and a norm per block. With 4 bits this is a little more than half of TopK's. Integers that
    `of` sends stay unchanged. A codec is a function of one rank's tensor, such as TopK, Cast, Dense and QSGD. Other
    compressors are refused, and for `of` also one without floats to round. Error feedback belongs around it. Inside it
    has no effect.

    When to use it: if TopK still sends too much, half of it indices. Under LocalSGD it is Qsparse-local-SGD. Ranks
    train alone for H steps, then select and round their displacements, and feed back the error.

    Reference: Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification,
    and Local Computations", NeurIPS 2019, https://arxiv.org/abs/1906.02367
    """

    of: Compressor = knob(TopK(), doc="the codec that selects entries")
    by: Compressor = knob(QSGD(block=64), doc="the codec that rounds the selected entries")
    scaled: bool = knob(False, doc="scale rounded values by 1 / (1 + b): a contraction even if rounding is coarse")

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    @property
    def adds(self) -> float | None:
        """Returns b, the bound of the rounding's squared error relative to its input. None without a bound."""
        by = without_feedback(self.by)
        return worst(by.levels(Memory()).double(), by.block) if isinstance(by, Levels) else None

    def refuses(self) -> str | None:
        for what, held in (("of", without_feedback(self.of)), ("by", without_feedback(self.by))):
            if held.coder(Memory()) is None:
                return (
                    f"{what}={held}: it does not encode the tensor of one rank alone; use TopK, Cast or QSGD, or "
                    f"use it without Quantised"
                )
        if not any(part.is_floating_point() for part in self._chosen(torch.zeros(8))):
            return (
                f"of={self.of}: it yields only integers, so there is nothing to round; use TopK or Cast, or use "
                f"it without Quantised"
            )
        if self.scaled and self.adds is None:
            return f"scaled=True: the error that by={self.by} adds has no known bound; set scaled=False, or by=QSGD()"
        return None

    def refuses_feedback(self) -> str | None:
        if self.scaled or self.adds is None or self.adds < 1:
            return None
        return (
            f"by={self.by}: its squared error can be {self.adds:.3g} times that of its input, so it would grow under "
            f"error feedback; set scaled=True, or use smaller blocks: QSGD(block=64)"
        )

    def _chosen(self, x: Tensor) -> Payload:
        """Returns the payload of `of` for such a tensor, with sizes only."""
        chooses = without_feedback(self.of).coder(Memory())
        return chooses.encode(sizes_of(x)) if chooses else ()

    def coder(self, memory: Memory) -> Coder:
        chooses, rounds = without_feedback(self.of).coder(memory), without_feedback(self.by).coder(memory)
        assert chooses is not None and rounds is not None, "refused before it starts"
        return _Twice(chooses, rounds, 1 / (1 + (self.adds or 0.0)) if self.scaled else 1.0)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if not bucket.data.numel():
            return None
        return await all_told(self.coder(memory), rank, bucket)


class _Twice:
    """Encodes one coder's floats with another coder."""

    def __init__(self, chooses: Coder, rounds: Coder, scale: float) -> None:
        self._chooses, self._rounds, self._scale = chooses, rounds, scale

    def encode(self, x: Tensor) -> Payload:
        out: list[Tensor] = []
        for part in self._chooses.encode(x):
            out += self._rounds.encode(part) if part.is_floating_point() else (part,)
        return tuple(out)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        left, parts = list(payload), []
        for part in self._chooses.encode(sizes_of(like)):
            if part.is_floating_point():
                its = [left.pop(0) for _ in self._rounds.encode(part)]
                parts.append(self._rounds.decode(tuple(its), like.new_empty(part.shape, dtype=part.dtype)))
            else:
                parts.append(left.pop(0))
        return self._chooses.decode(tuple(parts), like).mul_(self._scale)
