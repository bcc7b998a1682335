"""Quantised: what one codec has chosen crosses in the few bits of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.compressors._base import Coder, Compressor, Payload, all_told
from workbench.compressors._levels import Levels, worst
from workbench.compressors.error_feedback import ErrorFeedback, bare
from workbench.compressors.qsgd import QSGD
from workbench.compressors.top_k import TopK
from workbench.rank import Bucket, Memory, Rank, sizes_of
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Quantised(Compressor):
    """Composes two codecs: the numbers that `of` would send are encoded once more, by `by`.

        C(x) = Q(S(x)), S = `of`, Q = `by`;   with `scaled`  C(x) = Q(S(x)) / (1 + b)

    b is what Q adds to the square of what it rounds at most: E |Q(y) - y|^2 <= b |y|^2. For QSGD with blocks of d
    elements and s = 2^(bits-1) - 1 it is q^2 / 4 with q = sqrt(d) / s while q < 2, and q - 1 from there on. Under TopK
    with k of n elements C is a contraction: |x - C(x)|^2 <= (1 - (1 - b) k / n) |x|^2 on average where b < 1, and with
    `scaled`, whatever b is, (1 - k / (n (1 + b))) |x|^2. So it wants error feedback: the bare name Quantised means
    ErrorFeedback(of=Quantised()). Where b is 1 or more and it is not scaled, that is refused.

    Bytes sent per rank for k kept elements, with the default codecs: (p-1) (4 k + k bits / 8 + 4 ceil(k / block)), for
    indices as they are, codes, and a norm for each block; with 4 bits a little more than half of TopK's. Whatever `of`
    sends as whole numbers is left as it is. A codec is a function of one rank's tensor, such as TopK, Cast, Dense and
    QSGD; what is none is refused, and as `of` one that leaves no floats to round. Error feedback belongs around it;
    within, it is left out.

    When to use it: where TopK still sends too much, and indices are half of it. Under LocalSGD it is Qsparse-local-SGD:
    ranks train alone for H steps; of what they have moved some is chosen, rounded, and what is lost is fed back.

    Reference: Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification,
    and Local Computations", NeurIPS 2019, https://arxiv.org/abs/1906.02367
    """

    of: Compressor = knob(TopK(), doc="the codec that chooses")
    by: Compressor = knob(QSGD(block=64), doc="the codec that rounds what was chosen")
    scaled: bool = knob(False, doc="what was rounded counts 1 / (1 + b): a contraction however coarse it is")

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    @property
    def adds(self) -> float | None:
        """b: what the rounding adds to the square of what it rounds, at most; None where nothing is claimed."""
        by = bare(self.by)
        return worst(by.levels(Memory()).double(), by.block) if isinstance(by, Levels) else None

    def refuses(self) -> str | None:
        for what, held in (("of", bare(self.of)), ("by", bare(self.by))):
            if held.coder(Memory()) is None:
                return f"{what}={held}: it is no function of one rank's tensor; use TopK, Cast or QSGD, or it alone"
        if not any(part.is_floating_point() for part in self._chosen(torch.zeros(8))):
            return f"of={self.of}: it leaves whole numbers only, and nothing to round; use TopK or Cast, or it alone"
        if self.scaled and self.adds is None:
            return f"scaled=True: what by={self.by} adds is not known; use scaled=False with it, or by=QSGD()"
        return None

    def refuses_feedback(self) -> str | None:
        if self.scaled or self.adds is None or self.adds < 1:
            return None
        return (
            f"by={self.by}: it may add {self.adds:.3g} times the square of what it rounds, and would grow under error "
            f"feedback; use scaled=True with it, or smaller blocks: QSGD(block=64)"
        )

    def _chosen(self, x: Tensor) -> Payload:
        """What `of` makes of such a tensor, as sizes only."""
        chooses = bare(self.of).coder(Memory())
        return chooses.encode(sizes_of(x)) if chooses else ()

    def coder(self, memory: Memory) -> Coder:
        chooses, rounds = bare(self.of).coder(memory), bare(self.by).coder(memory)
        assert chooses is not None and rounds is not None, "refused before it starts"
        return _Twice(chooses, rounds, 1 / (1 + (self.adds or 0.0)) if self.scaled else 1.0)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if not bucket.data.numel():
            return None
        return await all_told(self.coder(memory), rank, bucket)


class _Twice:
    """One coder's floats through another."""

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
