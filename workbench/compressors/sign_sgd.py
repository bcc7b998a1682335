"""SignSGD: ranks vote on the sign of every element, and the majority's sign comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import wide, within
from workbench.compressors._two_hop import packed, unpacked
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class SignSGD(Compressor):
    """Sends the sign of each element; every element of the result has the sign of most ranks.

        out = scale * sgn(sum over ranks of sgn(m_i)),   m_i <- momentum * m_i + (1 - momentum) * x_i

    Rank j counts the votes on chunk j and sends the majority's signs to all ranks. A zero votes for +; a tie takes the
    counting rank's own vote. One byte holds 8 signs. A rank sends (p-1) (2 m / 8 + 4) bytes for chunks of m = n / p
    elements. For any p, that is 1/32 of a dense all-reduce. With `momentum` each rank votes with a moving average of
    its own gradients: Signum, usually with 0.9.

    The result is not a sum: only its direction comes from the gradients. With scale "mean" each element has the mean
    magnitude of the inputs, so learning rates keep about their meaning. With "one" every element is +1 or -1, as in the
    paper. Then `lr` is the distance that each parameter moves in each step; begin with 0.0001. A bucket of zeros on all
    ranks stays zero. A bucket with a non-finite number on any rank becomes NaN.

    Each rank counts 1/p of the result as its own contribution, so that error feedback's sums agree. But a majority is
    no contraction of the sum, and feedback does not correct it. EFSignSGD sends the signs with their own magnitudes in
    one hop, and OneBit in 2.

    When to use it: very slow networks and many ranks, with an optimizer without momentum. Also if a few ranks may send
    wrong values, which a majority overrules. With skewed noise it need not converge. Counting every tie as + would
    drift upwards, most with few ranks. With 2 ranks, 50 % of all votes on noise are ties.

    Reference: Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
    Problems", ICML 2018, https://arxiv.org/abs/1802.04434; Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD
    with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019, https://arxiv.org/abs/1810.05291
    """

    scale: str = knob("mean", choices=("mean", "one"), doc="magnitude of the result: that of the input, or 1")
    momentum: float = knob(0.0, 0.0, 0.999, doc="momentum of the gradient that is voted on (Signum: 0.9); 0: none")

    buffer: ClassVar[str] = "sign_sgd"
    kind: ClassVar[str] = "quantised"

    @property
    def own(self) -> dict[str, str]:
        return super().own | {self.buffer: "mean"}

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        n, size = bucket.data.numel(), rank.size
        if not n:
            return None
        x = self._averaged(bucket, memory).float()
        m = -(-n // size)
        votes = torch.nn.functional.pad(x, (0, m * size - n)).view(size, m) >= 0
        mean = x.abs().mean()[None].view(torch.uint8).expand(size, 4)
        came = await rank.all_to_all(torch.cat([mean, packed(votes.view(torch.uint8), 1)], 1), bucket.name)
        means = came[:, :4].reshape(-1).view(torch.float32)
        ayes = unpacked(came[:, 4:], 1, m).sum(0, dtype=torch.int32) * 2
        won = torch.where(ayes == size, votes[rank.index], ayes > size)
        every = await rank.all_gather(packed(won[None].view(torch.uint8), 1)[0], bucket.name)
        signs = unpacked(every, 1, m).view(-1)[:n].float().mul_(2.0).sub_(1.0)
        bucket.data.copy_(within(signs.mul_(self._magnitude(means.sum())), bucket.data.dtype))
        return bucket.data / size

    def _averaged(self, bucket: Bucket, memory: Memory) -> Tensor:
        """Returns this rank's vote. After a first momentum its average stays up to date, even while momentum is 0."""
        if not self.momentum and self.buffer not in memory.buffers:
            return bucket.data
        average = memory.flat(self.buffer, bucket, wide(bucket.data.dtype))
        x = average.mul_(self.momentum).add_(bucket.data, alpha=1 - self.momentum).clone()
        average.nan_to_num_(0.0, 0.0, 0.0)
        return x

    def _magnitude(self, mean: Tensor) -> Tensor:
        size = mean if self.scale == "mean" else mean.sign()
        return torch.where(mean.isfinite(), size, torch.nan)
