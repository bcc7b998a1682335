"""Top-k sparsification: sends only the largest entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Codec, Payload
from workbench.compressors._select import largest
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Sends only the k = density * n entries of largest magnitude of each bucket.

        C(x)_i = x_i  if |x_i| is among the k largest, else 0

    Each entry travels as its value and a 32-bit index, and every rank gathers all entries. Bytes sent per rank: (p-1) *
    8 k, less than a dense fp32 all-reduce while density < 1/p. Biased, so it wants error feedback: the bare name TopK
    means ErrorFeedback(of=TopK()).

    The k largest are exact, but a long bucket is not sorted. A sample gives the candidates, and only these are sorted.
    `SampledTopK` stops at the sample's threshold.

    When to use it: very slow networks. Finding the entries takes several times as long as copying the bucket, so Dense
    wins on a fast network.

    Reference: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
    https://arxiv.org/abs/1809.07599
    """

    density: float = knob(
        0.01, 0.0001, 1.0, log=True,
        doc="fraction of the entries that are sent, with indices, to all p ranks: 1 / (p * density) times fewer bytes",
    )  # fmt: skip

    contraction: ClassVar[bool] = True
    kind: ClassVar[str] = "sparse"
    starter: ClassVar[bool] = True

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def encode(self, x: Tensor) -> Payload:
        x = x.flatten()
        k = max(1, round(self.density * x.numel()))
        if k >= x.numel():
            index = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
            return x.clone(), index
        index = largest(x, k)
        return x[index], index.to(torch.int32)

    def chosen(self, payload: Payload) -> Tensor:
        return payload[1]

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        values, index = payload
        return like.new_zeros(like.numel()).index_add_(0, index, values.to(like.dtype)).view(like.shape)
