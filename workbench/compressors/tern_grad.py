"""TernGrad: sends -1, 0 or 1 for every element, drawn without bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import within
from workbench.compressors._stochastic import dithered
from workbench.compressors._two_hop import packed, unpacked
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class TernGrad(Compressor):
    """Sends every element as -1, 0 or 1 times a scale of its layer. The draw is random and unbiased.

        C(x) = s * sign(x) * b,   b = 1 with probability |x| / s, else 0;   s = max |x| of the layer

    With `one_scale` all ranks take the largest s (one all-reduce of 4 bytes per layer). Then one all-reduce adds up the
    draws as integers. A draw is 0, 1 or 2. It has enough bits for the sum of p draws: 4 up to 7 ranks, 8 up to 127,
    else 16. Bytes sent per rank: 2 (p-1)/p * (n bits / 8 + 4 layers). Without `one_scale` every rank keeps its own s
    and gathers all draws in 2 bits: (p-1) (n / 4 + 4 layers). This has less noise. It sends the same bytes with 4 or 8
    ranks, and more with many.

    Unbiased, with the variance s ||x||_1 - ||x||^2. This may be many times ||x||^2. Error feedback needs an error
    smaller than the input. Here the residual would grow without bound, so error feedback is refused. `clip_rms` first
    clips a layer at this many root mean squares, 2.5 in the paper. This makes s far smaller and adds a bias. A layer
    with a non-finite number becomes NaN.

    When to use it: on slow networks with many steps and batches with larger noise of their own. It needs no memory.
    ByteGrad in 4 bits sends as much up to 7 ranks and has a far smaller error in every step.

    The public code takes the mean of the ranks' scales and clips larger values, so its sum is biased. It clips by a
    layer's spread about its mean, not about zero.

    Reference: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
    NeurIPS 2017, https://arxiv.org/abs/1705.07878
    """

    one_scale: bool = knob(
        True, doc="one scale for all ranks, so that the all-reduce can add codes; false: one per rank"
    )
    clip_rms: float = knob(0.0, 0.0, 10.0, unit="root mean squares", doc="clip each layer at this value; 0: off")

    unbiased: ClassVar[bool] = True
    kind: ClassVar[str] = "quantised"

    def refuses_feedback(self) -> str | None:
        return (
            "of=TernGrad: its error is larger than its input, so it would grow without bound under error feedback; "
            "use it without error feedback, because it is unbiased, or use EFSignSGD with error feedback"
        )

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if not bucket.data.numel():
            return None
        x, ends = bucket.data.float(), [part.stop for part in bucket.parts if part.stop > part.start]
        layers = [b - a for a, b in zip([0, *ends], [*ends, x.numel()], strict=True) if b > a]
        if self.clip_rms:
            x = torch.cat([_clipped(layer, self.clip_rms) for layer in x.split(layers)])
        scales = torch.stack([layer.abs().amax() for layer in x.split(layers)])
        scales = torch.where(scales.isfinite(), scales, torch.inf)  # a maximum may lose a NaN, but not an infinity
        if self.one_scale:
            scales = await rank.all_reduce(scales, "max", bucket.name)
        draws = _drawn(x, _spread(scales, layers), memory)
        own = _restored(draws, scales, layers, 1)
        total = await (self._added if self.one_scale else self._gathered)(rank, bucket.name, draws, scales, layers)
        bucket.data.copy_(within(total, bucket.data.dtype))
        return own.to(bucket.data.dtype)

    async def _added(self, rank: Rank, name: str, draws: Tensor, scales: Tensor, layers: list[int]) -> Tensor:
        """Sums all ranks' draws, each in its own bits of a byte or a word."""
        n, bits = draws.numel(), field(rank.size)
        if bits > 8:
            words = torch.nn.functional.pad(draws, (0, n % 2)).int().view(2, -1)
            summed = await rank.all_reduce(words[0] | words[1] << bits, "sum", name)
            counts = torch.cat([summed & (2**bits - 1), summed >> bits])[:n]
        else:
            summed = await rank.all_reduce(packed(draws[None], bits)[0], "sum", name)
            counts = unpacked(summed[None], bits, n)[0]
        return _restored(counts, scales, layers, rank.size)

    async def _gathered(self, rank: Rank, name: str, draws: Tensor, scales: Tensor, layers: list[int]) -> Tensor:
        """Gathers all ranks' draws and scales, and adds them up in rank order."""
        n, head = draws.numel(), 4 * len(layers)
        every = await rank.all_gather(torch.cat([scales.view(torch.uint8), packed(draws[None], 2)[0]]), name)
        total = torch.zeros(n, device=draws.device)
        for row in every:
            its = row[:head].clone().view(torch.float32)
            total += _restored(unpacked(row[None, head:], 2, n)[0], its, layers, 1)
        return total


def field(size: int) -> int:
    """Returns the bits of a field that holds the sum of `size` draws of 0, 1 or 2, which divides a byte or a word."""
    return next(bits for bits in (2, 4, 8, 16) if 2 * size < 2**bits)


def _clipped(layer: Tensor, clip: float) -> Tensor:
    limit = layer.square().mean().sqrt() * clip
    return torch.minimum(torch.maximum(layer, -limit), limit)


def _spread(scales: Tensor, layers: list[int]) -> Tensor:
    """One number per layer -> one per element."""
    return torch.cat([s.expand(n) for s, n in zip(scales, layers, strict=True)])


def _drawn(x: Tensor, scales: Tensor, memory: Memory) -> Tensor:
    """Returns 0, 1 or 2 for -1, 0 and 1: `(n,)` uint8."""
    ones = dithered((x.abs() / scales).nan_to_num_(0.0), memory.generator(x.device), top=1)
    return torch.where(x < 0, 1 - ones, 1 + ones)


def _restored(counts: Tensor, scales: Tensor, layers: list[int], size: int) -> Tensor:
    """Returns the sum of `size` ranks' draws `(n,)` as float32. NaN if a scale is not finite."""
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return (counts.float() - size) * _spread(scales, layers)
