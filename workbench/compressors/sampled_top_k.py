"""Top-k by a sampled threshold: sends all entries that reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from workbench.compressors._select import roughly
from workbench.compressors._sparse import Sparse
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class SampledTopK(Sparse):
    """Sends about the k = density * n largest entries of each bucket, which reach a sample's threshold.

        C(x)_i = x_i  if |x_i| >= t, else 0
        t = the r-th largest magnitude of m sampled entries,  r = density * m + 2 sqrt(density * m)

    Each step draws another sample. Its size m is 1 % of the bucket, or more so that 64 of the k largest are in it. The
    rank r aims a little low, because an extra entry costs less than a missing one. If fewer than 0.98 k reach t, it
    samples a lower one. If more than 1.2 k do, it takes the k largest. A rank with k_i entries of at least t sends
    (p-1) * (8 + 8 k_i) bytes. Zeros are never sent, and buckets below 16384 entries are sorted. Biased: the bare name
    SampledTopK means ErrorFeedback(of=SampledTopK()).

    DGC selects in this way and adds momentum. The authors' code samples at a fixed stride, which can align with the
    rows of a matrix. Here entries are drawn at random. Their code drops surplus entries by position, from the end of
    the bucket. Here no dropped entry is larger than a sent one.

    When to use it: to see the effect of sampling alone. `TopK` searches in the same way, then sorts the candidates. So
    it sends exactly the k largest, in little more time.

    Reference: Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for
    Distributed Training", ICLR 2018, https://arxiv.org/abs/1712.01887
    """

    density: float = knob(0.01, 0.0001, 1.0, log=True, doc="target fraction of the entries that are sent")

    contraction: ClassVar[bool] = True

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def choose(self, x: Tensor, memory: Memory, bucket: Bucket) -> tuple[Tensor, Tensor]:
        index = roughly(x, max(1, round(self.density * x.numel())), memory.generator(x.device))
        return index, x[index]
