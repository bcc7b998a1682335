"""PowerSGD: sends matrices as two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from workbench.compressors._low_rank import Contribution, LowRank, multiply, orthonormal
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Sends each weight matrix's gradient as two thin factors, found by one power iteration per step.

        P = orthonormal(sum over ranks of M_i Q);   Q <- sum over ranks of M_i^T P;   out = P Q^T

    M_i is rank i's gradient as an n x m matrix (dimensions after the first are joined). The step begins with the
    previous Q, orthonormalised. r = `rank` is the number of columns of P and Q, not a process. Bytes sent per rank for
    an fp32 matrix: 2 (p-1)/p * 4 r (n + m), in 2 consecutive all-reduces per bucket. `iterations` multiplies this; each
    iteration begins with the Q of the one before. Vectors are sent whole with the first factor. So are matrices that
    would shrink by less than `min_compression_rate` (torch's rule and default: r (n + m) * 2 < n m). Time: 3 products
    of n m r per rank and iteration, one more for the rank's own contribution.

    A rank contributes P (M_i^T P)^T, and contributions add up to `out`. So the result is independent of how the batch
    is spread over ranks. Biased, so it wants error feedback: the bare name PowerSGD means ErrorFeedback(of=PowerSGD()).
    With one rank it still approximates that rank's own gradient. Q is kept by parameter. A change of bucket size or
    strategy keeps it. A smaller `rank` cuts columns and a larger one adds random columns. ACPSGD continues from it.
    Without `warm_start` every step draws a new Q: one power iteration from random directions finds less.

    When to use it: networks slow enough that 2 short messages beat a long one, and layers with large matrices. Unlike
    TopK's, its bytes per rank do not grow with the number of ranks. With fp16 gradients M Q may overflow although the
    gradient does not; bf16 has the range.

    Results equal those of torch's powerSGD_hook (tests/unit/test_power_sgd.py), without its limits in 2.13. The hook
    hangs on gloo with 2 buckets or more. With a smaller rank it sends as much as before; a larger one raises. It keeps
    its residual by bucket and divides by zero if a layer's gradient is zero. Its residuals come from the aggregated
    result and drift.

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, https://arxiv.org/abs/1905.13727
    """

    iterations: int = knob(1, 1, 8, doc="power iterations per step, each with two all-reduces")

    starter: ClassVar[bool] = True

    def sends(self, n: int, m: int) -> float:
        return self.iterations * self.rank * (n + m)

    async def reduce_owing(self, rank: Rank, bucket: Bucket, memory: Memory) -> Contribution | None:
        stacks, whole = self.sorted(bucket)
        if not stacks:
            await rank.all_reduce(bucket.data, "sum", bucket.name)
            return None
        x = bucket.data.to(torch.promote_types(bucket.data.dtype, torch.float32))
        others = [s.other for s in stacks]
        before = [orthonormal(self.directions(memory, s, x, fresh=not self.warm_start)) for s in stacks]
        found, first = await self.summed(rank, bucket, x, stacks, before, whole)
        for left in reversed(range(self.iterations)):
            ps = [orthonormal(p) for p in found]
            qs, own = await self.summed(rank, bucket, x, others, ps, [])
            if left:
                found, _ = await self.summed(rank, bucket, x, stacks, [orthonormal(q) for q in qs], [])
        own.whole, own.rest, own.sums = first.whole, first.rest, own.sums + first.sums[-1:]
        for stack, other, p, q, old in zip(stacks, others, ps, qs, before, strict=True):
            multiply(q, p.mT, other.matrices(x))
            self.remember(memory, stack, q, old)
        bucket.data.copy_(x)
        return own
