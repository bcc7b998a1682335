"""ScaleCom: ranks take turns to choose the entries, so an all-reduce can add them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import wide, within
from workbench.compressors.dense import Dense
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class ScaleCom(Compressor):
    """All ranks send the places of one rank's largest entries: CLT-k, with a low-pass filter on the memory.

        x_i = m_i + grad_i;   I = the k = density * n largest |entries| of x_leader;   leader = t mod p
        out = sum over ranks of x_i on I, 0 elsewhere;   m_i <- (1 - beta) m_i + beta (x_i - what i sent)

    All ranks send the same entries, so values need no indices and sums stay sparse. Bytes sent per rank: (p-1)/p * 4 k
    for the leader's 32-bit indices and 2 (p-1)/p * 4 k for the fp32 values. They are nearly the same for any p. These
    are 2 consecutive collectives. Only the leader searches its largest entries, so each rank searches in every p-th
    step.

    It has its own feedback through the same residual as ErrorFeedback. So ErrorFeedback has no effect inside or around
    it. beta = 1 is plain error feedback of CLT-k: nothing is lost. With a smaller beta only this share of each step's
    error enters the memory. So the ranks' memories stay more alike, and one leader can choose for all ranks.

    When to use it: instead of TopK, with more ranks. With large batches at scaled learning rates, lower `beta`. If the
    ranks' data differ in kind, one rank's choice does not suit the other ranks.

    Reference: Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
    Training", NeurIPS 2020, https://arxiv.org/abs/2104.11125
    """

    density: float = knob(0.01, 0.0001, 1.0, log=True, doc="fraction of the entries that are sent")
    beta: float = knob(1.0, 0.01, 1.0, doc="beta, low-pass filter: share of each step's error that enters the residual")

    residual: ClassVar[str] = ErrorFeedback.residual
    buffer: ClassVar[str] = "scale_com"
    drops: ClassVar[tuple[str, ...]] = ("scale_com",)
    kind: ClassVar[str] = "sparse"

    def whole(self) -> Compressor:
        return ErrorFeedback(of=Dense())

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        grad = bucket.data
        if not grad.numel():
            return None
        k = max(1, round(self.density * grad.numel()))
        m = memory.flat(self.residual, bucket, wide(grad.dtype))
        x = m + grad
        leader = self._turn(bucket, memory) % rank.size
        index = x.abs().topk(k, sorted=False).indices if rank.index == leader else x.new_empty(k, dtype=torch.int64)
        index = (await rank.broadcast(index.to(torch.int32), leader, bucket.name)).long()
        values = within(x[index], grad.dtype)
        before = m[index]
        m.add_(grad, alpha=self.beta)
        left = m[index] - self.beta * values
        total = await rank.all_reduce(values, "sum", bucket.name)
        m[index] = torch.where(total.isfinite(), left, before)  # a sum that overflows delivers nothing
        m.nan_to_num_(0.0, 0.0, 0.0)
        grad.zero_()
        grad[index] = total
        return None

    def _turn(self, bucket: Bucket, memory: Memory) -> int:
        """Returns the number of earlier exchanges of these parameters, the same on all ranks."""
        turns = memory.parts.setdefault(self.buffer, {})
        turn: int = max((turns.get(part.name, 0) for part in bucket.parts), default=0)
        turns.update((part.name, turn + 1) for part in bucket.parts)
        return turn
