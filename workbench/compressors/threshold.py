"""Threshold-v: sends all entries above a fixed magnitude."""

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
    """Sends every entry with a magnitude of at least v = `threshold`, however many these are.

        C(x)_i = x_i  if |x_i| >= v, else 0

    Every element of the result is off by less than p v. A rank with k_i entries of at least v sends (p-1) * (8 + 8 k_i)
    bytes: only the 8 if none reaches v, and p times a dense all-reduce if all do. So v must suit the gradients. It is
    compared with the input: under DDP shares, the gradient divided by the number of ranks. Biased: the bare name
    Threshold means ErrorFeedback(of=Threshold()), under which an entry is sent when it has grown to v.

    When to use it: if the amount sent should follow the gradients. The paper finds: under error feedback and for one
    amount over the whole training, a constant v leaves less error than a constant k. It neither sorts nor
    samples: one pass finds the entries.

    It compares magnitudes. (GRACE's code bounds v by the largest signed entry.)

    Reference: Sahu, Dutta, Abdelmoniem, Banerjee, Canini and Kalnis, "Rethinking Gradient Sparsification as Total Error
    Minimization", NeurIPS 2021, https://arxiv.org/abs/2108.00951
    """

    threshold: float = knob(0.01, 1e-12, 1e6, log=True, doc="smallest magnitude of a sent entry")

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def choose(self, x: Tensor, memory: Memory, bucket: Bucket) -> tuple[Tensor, Tensor]:
        index = above(x, self.threshold)
        return index, x[index]
