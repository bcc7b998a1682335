"""Deep Gradient Compression: top-k of accumulated momentum, for densities like 0.001."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import wide, within
from workbench.compressors._sparse import Sparse
from workbench.rank import MOMENTUM, Bucket, Memory, Rank
from workbench.settings import knob

LOW, HIGH = 0.8, 1.3  # as factors of k: below LOW the threshold falls; above HIGH the largest are taken
MAX_SEARCHES = 10


@dataclass(frozen=True, kw_only=True)
class DGC(Sparse):
    """Momentum before compression: each rank accumulates its own momentum and sends the largest accumulated entries.

        u <- momentum u + grad;   v <- v + u                   nesterov:  v <- v + grad + momentum u
        out = sum over ranks of the density * n largest |entries| of v;   where an entry was sent  u, v <- 0, 0

    With error feedback before a momentum optimizer, an entry that waits k steps gets its momentum only afterwards. Here
    momentum accumulates as without compression. So `momentum` replaces SGD's, and the optimizer steps without momentum.
    When it is turned on live, every rank continues with its share of the optimizer's momentum as u. When it is turned
    off, v is sent once as a whole. The sum of all u then becomes the optimizer's momentum. SGD keeps the weight decay's
    part of its momentum. So density = 1 and masking = False equal SGD with momentum, through any number of switches. It
    refuses optimizers with a momentum that is not a plain sum of gradients: Adam, LARS and Nesterov's. With momentum =
    0 it leaves an optimizer's momentum alone and works with any optimizer.

    `masking` stops the momentum of sent entries, which would push on in an outdated direction. The residual is v, so an
    ErrorFeedback around it has no effect. Everything sent plus v equals the sum of all u added to v. Non-finite values
    are sent and not kept.

    The threshold comes from a random `sample` of the entries, large enough for 2 entries to send. If fewer than 0.8 of
    the wanted number reach the threshold, it falls. If more than 1.3 times the number do, only the largest are sent.
    Otherwise all are sent. (The authors' code drops entries at the end of the tensor.) Before accumulation,
    `local_clip` limits the norm of each parameter's gradient on each rank to local_clip / sqrt(p). The sum of p
    independent gradients is then about as long as one clipped to local_clip.

    Bytes sent by rank i for k_i entries in fp32: (p-1) * (8 + 8 k_i). With density = 1 it is an all-reduce. It keeps 2
    values
    per entry, in fp32 at least. Rounding errors of bf16 and values beyond fp16's range wait in v. In the first epochs
    the authors lower the density step by step: `0.25, 0.063, 0.015, 0.004, 0.001`.

    When to use it: very slow networks and SGD with momentum.

    Reference: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
    ICLR 2018, https://arxiv.org/abs/1712.01887, and its code, https://github.com/synxlin/deep-gradient-compression
    """

    density: float = knob(0.001, 0.0001, 1.0, log=True, doc="fraction of the entries that are sent")
    momentum: float = knob(0.9, 0.0, 0.999, doc="momentum: decay rate of each rank's running sum of gradients")
    nesterov: bool = knob(False, doc="Nesterov momentum instead of classical")
    masking: bool = knob(True, doc="momentum factor masking: the momentum of sent entries is cleared")
    sample: float = knob(
        0.01, 0.001, 1.0, log=True, doc="fraction of the entries that are sampled to find the threshold"
    )
    local_clip: float = knob(0.0, 0.0, 1e6, log=True, doc="gradient clipping per parameter: norm times sqrt(p); 0: off")

    residual: ClassVar[str] = "velocity"

    @property
    def carries(self) -> bool:
        return self.momentum > 0

    @property
    def own(self) -> dict[str, str]:
        return super().own | {MOMENTUM: "sum"}

    def whole(self) -> Compressor:
        return replace(self, density=1.0, masking=False)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x = bucket.data
        if not x.numel():
            return None
        if self.local_clip:
            _clip(bucket, self.local_clip * rank.size**-1.5)  # a share is 1 / p of a gradient
        u, v = self._gathered(bucket, memory)
        x.copy_(within(v, x.dtype))
        if self.density < 1:
            sent, own = await self.exchanged(rank, bucket, memory)
        else:
            own = x.clone()
            await rank.all_reduce(x, "sum", bucket.name)
            sent = own != 0
        v.sub_(own).nan_to_num_(0.0, 0.0, 0.0)
        if u is not None:
            if self.masking:
                u[sent] = 0.0
            u.nan_to_num_(0.0, 0.0, 0.0)
        return None

    def _gathered(self, bucket: Bucket, memory: Memory) -> tuple[Tensor | None, Tensor]:
        """Adds this step's gradient. Returns u (None without momentum) and v."""
        grad, kind = bucket.data, wide(bucket.data.dtype)
        v = memory.flat(self.residual, bucket, kind)
        if not self.carries:
            return None, v.add_(grad)
        u = memory.flat(MOMENTUM, bucket, kind).mul_(self.momentum).add_(grad)
        return u, v.add_(grad).add_(u, alpha=self.momentum) if self.nesterov else v.add_(u)

    def choose(self, x: Tensor, memory: Memory, bucket: Bucket) -> tuple[Tensor, Tensor]:
        index = _largest(x, self.density, self.sample, memory.generator(x.device))
        return index, x[index]


def _largest(x: Tensor, density: float, sample: float, generator: Generator | None) -> Tensor:
    """Indices of about k = density * n entries above a sampled threshold; never of zeros."""
    n = x.numel()
    k = max(1, round(density * n))
    size = x.abs().nan_to_num_(torch.inf, torch.inf)
    few = max(math.ceil(sample * n), math.ceil(2 / density))
    seen = size[torch.randint(n, (few,), generator=generator, device=x.device)] if few < n else size
    wanted = k if few >= n else math.ceil(density * few)
    limit = float(seen.topk(wanted, sorted=False).values.amin())
    for _ in range(MAX_SEARCHES):
        index = ((size >= limit) & (size > 0)).nonzero().flatten()
        if len(index) >= LOW * k or not 0 < limit < math.inf:
            break
        limit *= LOW
    if len(index) > HIGH * k:
        index = index[size[index].topk(k, sorted=False).indices]
    return index


def _clip(bucket: Bucket, longest: float) -> None:
    for part in bucket.parts:
        piece = bucket.data[part.start : part.stop]
        piece.mul_((longest / piece.norm()).clamp_(max=1.0))
