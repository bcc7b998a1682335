"""Threshold-v: what is large enough crosses the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.compressors._select import above
from workbench.compressors._sparse import Sparse
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Threshold(Sparse):
    """Every entry whose magnitude is v = `threshold` or more crosses the wire, be they few or many.

        C(x)_i = x_i  if |x_i| >= v, else 0

    No element of the result is off by p v or more. A rank sends (p-1) * (8 + 8 k_i) bytes if k_i of its entries
    reach v: nothing but the 8 where none does, and p times as much as a dense all-reduce where all do, so v must suit
    the gradients. It is compared with what is handed in: under DDP shares, the gradient divided by the number of
    ranks. Biased: the bare name Threshold means ErrorFeedback(of=Threshold()), under which whatever grows to v is sent.

    When to use it: the amount that is sent shall follow the gradients. Under error feedback and for one amount over
    the whole training, a constant v leaves less error than a constant k (the paper's finding). Nothing is sorted or
    sampled: one pass finds what crosses.

    GRACE's code bounds v by the largest entry, sign and all, so a bucket without positive entries is sent whole. Here
    magnitudes are compared.

    Reference: Sahu, Dutta, Abdelmoniem, Banerjee, Canini and Kalnis, "Rethinking Gradient Sparsification as Total Error
    Minimization", NeurIPS 2021, https://arxiv.org/abs/2108.00951
    """

    threshold: float = knob(0.01, 1e-12, 1e6, log=True, doc="magnitude from which on an entry crosses the wire")

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def choose(self, x: Tensor, memory: Memory, bucket: Bucket) -> tuple[Tensor, Tensor]:
        index = above(x, self.threshold)
        return index, x[index]
