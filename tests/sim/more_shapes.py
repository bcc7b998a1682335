"""A strategy shape that uses only the verbs of a Rank: a two-hop reduce.

docs/project/shapes.md shows it and names the test that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.compressors import Compressor
from workbench.rank import Bucket, Memory, Rank


@dataclass(frozen=True, kw_only=True)
class TwoHop(Compressor):
    """A mean of 8-bit codes. Codes cannot be added, so each rank sums one chunk, encodes the sum and sends it to all.

        codes of chunk j -> rank j;  sum_j = sum of decoded chunks;  codes of sum_j -> everybody

    Sends (p-1)/p (n + n) bytes and 4 bytes per chunk and hop, 25 % of a dense all-reduce for any p.

    Reference: Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning", Middleware 2022,
    https://arxiv.org/abs/2111.08617
    """

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        n = bucket.data.numel()
        codes, scale = coded(pad(bucket.data, (0, -n % rank.size)).view(rank.size, -1))
        own = (codes * scale).view(-1)[:n]
        codes = await rank.all_to_all(codes, bucket.name)
        scale = await rank.all_to_all(scale, bucket.name)
        codes, scale = coded((codes * scale).sum(0))
        codes = await rank.all_gather(codes, bucket.name)
        scale = await rank.all_gather(scale, bucket.name)
        bucket.data.copy_((codes * scale).view(-1)[:n])
        return own


def coded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) -> int8 codes (..., n) and their scale (..., 1): each row's largest magnitude is 127."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale.clamp_min(torch.finfo(rows.dtype).tiny)).round().to(torch.int8), scale
