"""Accordion: 2 compressors, the gentle one while a layer's gradient changes quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._split import by_part, split_momentum, twice
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.compressors.power_sgd import PowerSGD
from workbench.rank import Bucket, Memory, Part, Rank, values_of
from workbench.settings import knob


class _Level(NamedTuple):
    """The state of one parameter."""

    gentle: bool = True
    steps: int = 0  # exchanges since the last check
    norm: float = 0.0  # of the sum before the last check; 0: no sum or no check
    lr: float = 0.0  # of the last exchange


@dataclass(frozen=True, kw_only=True)
class Accordion(Compressor):
    """Compresses a layer gently in a critical regime and harshly otherwise, with two compressors.

        every `every` exchanges, for each parameter:   N = || sum of what these exchanges gave ||
        gentle   if |N_before - N| >= threshold N_before, if N_before = 0, at the first check, and before it
        harsh    otherwise
        gentle   at once when the learning rate has fallen, until the next check

    A regime is critical if the gradient's norm changes quickly: early, and after the learning rate has dropped. Bytes
    are those of each parameter's compressor. Parameters with the same compressor are coded together. Rank 0 records
    each decision in the Sample "level NAME": 1 gentle, 0 harsh.

    The sum is that of the aggregated gradient, which is bit-identical on all ranks. So all ranks decide alike without
    communication. The released code adds up rank 0's own gradients and broadcasts its decision. Under error feedback
    the aggregated sum is the sum of all gradients up to the residual, at any level. It takes one value of memory per
    element and one pass over the bucket per exchange.

    An epoch is `every` exchanges here, and all of them count. The released code checks every 10 epochs and counts the
    last 10 % of the exchanges. A rate that falls in every step keeps all layers gentle. Every switch keeps the
    residual: the bare name Accordion means ErrorFeedback(of=Accordion()). The sum leaves out non-finite values.

    A simulation with sizes only assumes constant norms. Layers are gentle until the second check, then harsh. These are
    the fewest possible bytes.

    When to use it: if the harsh level alone costs accuracy and the gentle one costs too many bytes. The paper's pairs
    are PowerSGD with ranks 2 and 1 (also 4 and 1), and TopK with densities 0.99 and 0.1.

    Reference: Agarwal et al., "Adaptive Gradient Communication via Critical Learning Regime Identification", MLSys
    2021, https://arxiv.org/abs/2010.16248
    """

    gentle: Compressor = knob(PowerSGD(rank=2), doc="compressor in a critical regime (the gentler one)")
    harsh: Compressor = knob(PowerSGD(rank=1), doc="compressor outside critical regimes")
    threshold: float = knob(0.5, 0.0, 1e6, doc="smallest relative change of the norm in a critical regime")
    every: int = knob(100, 1, 10**6, unit="steps", log=True, doc="exchanges between two checks")

    assumes: ClassVar[str] = "norms do not change: gentle until the second check, harsh from there on"
    buffer: ClassVar[str] = "accordion"
    drops: ClassVar[tuple[str, ...]] = ("accordion",)

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def refuses(self) -> str | None:
        return split_momentum(self.gentle, self.harsh) or twice(self)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        known = memory.parts.setdefault(self.buffer, {})
        before = [known.get(part.name, _Level(lr=rank.lr)) for part in bucket.parts]
        now = [one._replace(gentle=one.gentle or rank.lr < one.lr, steps=one.steps + 1, lr=rank.lr) for one in before]
        own = await by_part([self.gentle if one.gentle else self.harsh for one in now], rank, bucket, memory)
        now = self._checked(now, bucket, memory)
        for part, was, one in zip(bucket.parts, before, now, strict=True):
            decided = part.name not in known or not one.steps or one.gentle != was.gentle
            known[part.name] = one
            if decided and rank.index == 0:
                await rank.sample(f"level {part.name}", float(one.gentle))
        return own

    def _checked(self, levels: list[_Level], bucket: Bucket, memory: Memory) -> list[_Level]:
        """Adds the exchanged bucket to the sums and sets new levels for the parameters with a due check."""
        x = bucket.like(bucket.data.to(torch.promote_types(bucket.data.dtype, torch.float32)))
        total = memory.flat(self.buffer, x)
        total.add_(x.data).nan_to_num_(0.0, 0.0, 0.0)
        due = [part for part, one in zip(bucket.parts, levels, strict=True) if one.steps >= self.every]
        norms = dict(zip(due, _norms(total, due), strict=True))
        for part in due:
            total[part.start : part.stop].zero_()
        return [
            self._next(one, norms[part]) if part in norms else one
            for part, one in zip(bucket.parts, levels, strict=True)
        ]

    def _next(self, level: _Level, norm: float) -> _Level:
        """Returns the level after a check with this norm of the sum."""
        steady = abs(level.norm - norm) < self.threshold * level.norm  # never after a norm of 0
        return level._replace(gentle=not steady, steps=0, norm=norm)


def _norms(total: Tensor, parts: list[Part]) -> list[float]:
    """Returns each part's norm, in float64 because machines add differently. 1 with sizes only."""
    if not parts:
        return []
    each = [torch.linalg.vector_norm(total[part.start : part.stop], dtype=torch.float64) for part in parts]
    norms: list[float] = values_of(torch.stack(each), otherwise=1.0).tolist()
    return norms
