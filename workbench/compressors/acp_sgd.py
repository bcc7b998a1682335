"""ACPSGD: sends matrices as one thin factor per step, left and right in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.compressors._low_rank import TURN_NAME, Contribution, LowRank, multiply, orthonormal
from workbench.rank import Bucket, Memory, Rank


@dataclass(frozen=True, kw_only=True)
class ACPSGD(LowRank):
    """Sends each weight matrix's gradient as one thin factor: one half of PowerSGD's iteration per step.

        one step:   Q <- orthonormal(Q);   P <- sum over ranks of M_i Q;     out = P Q^T
        the next:   P <- orthonormal(P);   Q <- sum over ranks of M_i^T P;   out = P Q^T

    M_i is rank i's gradient as an n x m matrix (dimensions after the first are joined). r = `rank` is the number of
    columns of P and Q. Two steps with the same gradient equal one of PowerSGD. In turn a rank sends 2 (p-1)/p * 4 r n
    and 2 (p-1)/p * 4 r m bytes, half of PowerSGD's. One all-reduce per bucket and step sends them and overlaps
    backward, as with Dense. Vectors are sent whole in the same all-reduce. So are matrices that would shrink by less
    than `min_compression_rate` on average (r (n + m) < n m with its default 2). Time per rank: 2 products of n m r, one
    orthonormalisation, and one more product for its own contribution.

    A rank contributes (M_i Q) Q^T or P (M_i^T P)^T. Contributions add up to `out`. Biased, so it wants error feedback:
    the bare name ACPSGD means ErrorFeedback(of=ACPSGD()). A step sees the gradient only along the directions of the
    step before. Without `warm_start` every second step draws random directions. P, Q and the turn are kept by
    parameter. So it continues after a change of bucket size, rank or strategy. PowerSGD can continue from it.

    When to use it: if PowerSGD is faster than Dense, but its 2 consecutive messages keep the exchange from overlapping.

    The authors' code (github.com/lzhangbv/acpsgd) also compresses matrices that then need more bytes; here they are
    sent whole. It draws first factors from each rank's global generator, so ranks with different seeds sum products of
    different directions. Here the parameter's name is the seed.

    Reference: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning",
    ICDCS 2023, https://arxiv.org/abs/2306.08881
    """

    def sends(self, n: int, m: int) -> float:
        return self.rank * (n + m) / 2

    async def reduce_owing(self, rank: Rank, bucket: Bucket, memory: Memory) -> Contribution | None:
        stacks, whole = self.sorted(bucket, memory.parts.get(TURN_NAME, ()))
        if not stacks:
            await rank.all_reduce(bucket.data, "sum", bucket.name)
            return None
        x = bucket.data.to(torch.promote_types(bucket.data.dtype, torch.float32))
        known = [self.directions(memory, s, x, fresh=not (self.warm_start or s.turned)) for s in stacks]
        bases = [orthonormal(b) for b in known]
        factors, own = await self.summed(rank, bucket, x, stacks, bases, whole)
        for stack, base, f in zip(stacks, bases, factors, strict=True):
            multiply(f, base.mT, stack.matrices(x))
            self.remember(memory, stack.other, f, self.directions(memory, stack.other, x))
        bucket.data.copy_(x)
        return own
