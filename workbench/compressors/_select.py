"""Finds the largest entries of a long vector by a sampled threshold, without sorting.

`torch.topk` copies every element with its index and sorts these pairs. Here a sample of the magnitudes estimates the
k-th largest. One pass finds the entries that reach it, and at most these few are sorted. NaN counts as the largest
magnitude, as in `torch.topk`.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from workbench.rank import outlined

BLOCK_ELEMENTS = 2**17  # elements per pass: with their magnitudes and flags they fit the cache
MIN_SAMPLE_SHARE = 0.01  # minimum share of the entries in the sample
MIN_HITS = 64  # minimum number of sampled entries among the k largest
SORT_ELEMENTS = 2**14  # below this many entries sorting is as fast
LEAST, MOST = 0.98, 1.2  # bounds of the number that `roughly` finds, as factors of k

_EIGHT = 0x0101010101010101  # 8 flags that are set


@outlined(lambda x, k: x.new_empty(k, dtype=torch.int64))
def largest(x: Tensor, k: int) -> Tensor:
    """Returns indices `(k,)` int64 of the k largest magnitudes of `(n,)` in any order. Faster than `torch.topk`."""
    if not _samples(x, k):
        return _sorted(x, k)
    index = above(x, threshold_of(x, k, spare=4))
    if index.numel() < k or index.numel() > x.numel() // 2:
        return _sorted(x, k)
    return index[_sorted(x[index], k)]


def roughly(x: Tensor, k: int, generator: Generator | None = None) -> Tensor:
    """Returns int64 indices of about the k largest magnitudes of `(n,)`, found by a sampled threshold.

    It finds between 0.98 k and 1.2 k entries, or all nonzero ones if these are fewer. No other entry is larger than a
    found one. So the found entries have at least 98 % of the energy of the k largest. If too few reach the first
    threshold, it samples a lower one. If too many do, it takes the k largest.
    """
    if not _samples(x, k):
        index = _sorted(x, k)
        return index[x[index] != 0]
    index = _reaching(x, threshold_of(x, k, spare=2, generator=generator))
    if index.numel() < LEAST * k:
        index = _reaching(x, threshold_of(x, k, spare=6, generator=generator))
    if index.numel() < LEAST * k:
        index = _reaching(x, 0.0)
    if index.numel() > MOST * k:
        index = index[_sorted(x[index], k)]
    return index


def threshold_of(x: Tensor, k: int, *, spare: float = 0.0, generator: Generator | None = None) -> float:
    """The magnitude that about k of the n entries reach, from a sample drawn with `generator`.

    The sample has m entries: 1 % of n, or more to contain 64 of the k largest, or all. One entry is drawn from each of
    m stretches of equal length. The result is the sample's r-th largest, r = k m / n. The number of entries that reach
    it differs from k by about k / sqrt(r). `spare` lowers the aim by so many of these spreads. With 4, fewer than k
    reach it once in 10,000 times.
    """
    n = x.numel()
    m = _size(n, k)
    if m >= n:
        return float(x.abs().topk(k).values[-1])
    generator = generator or torch.Generator(x.device).manual_seed(n)
    at = torch.rand(m, dtype=torch.float64, generator=generator, device=x.device)
    at += torch.arange(m, device=x.device)
    at = at.mul_(n / m).long().clamp_(max=n - 1)
    hits = k * m / n
    r = math.ceil(hits + spare * math.sqrt(hits))
    return float(x[at].abs().topk(min(r, m)).values[-1])


def above(x: Tensor, threshold: float) -> Tensor:
    """Returns ascending int64 indices of the entries of `(n,)` that are NaN or have a magnitude of at least
    `threshold`.
    """
    n = x.numel()
    if x.device.type != "cpu" or n < 2 * BLOCK_ELEMENTS:
        return unset(x.abs() < threshold)
    below = torch.empty(n, dtype=torch.bool)
    room = torch.empty(BLOCK_ELEMENTS, dtype=x.dtype)
    for start in range(0, n, BLOCK_ELEMENTS):
        piece = x[start : start + BLOCK_ELEMENTS]
        # compares into floats and copies them, because torch compares into flags 5 times slower
        below[start : start + BLOCK_ELEMENTS].copy_(torch.abs(piece, out=room[: piece.numel()]).lt_(threshold))
    return unset(below)


def unset(flags: Tensor) -> Tensor:
    """Returns ascending int64 indices of the False entries of a bool `(n,)`. Fast if these are few."""
    whole = flags.numel() // 8 * 8
    if flags.device.type != "cpu" or whole < BLOCK_ELEMENTS or flags.storage_offset() % 8:
        return flags.logical_not().nonzero().flatten()
    eights = flags[:whole].view(torch.int64)
    some = eights.ne(_EIGHT).nonzero().flatten()
    if 2 * some.numel() > eights.numel():
        return flags.logical_not().nonzero().flatten()
    at = eights[some].view(torch.bool).logical_not_().nonzero().flatten()
    rest = flags[whole:].logical_not().nonzero().flatten().add_(whole)
    return torch.cat([some[at >> 3].mul_(8).add_(at.bitwise_and_(7)), rest])


def _reaching(x: Tensor, threshold: float) -> Tensor:
    """`above` without zeros."""
    return above(x, threshold) if threshold else x.nonzero().flatten()


def _size(n: int, k: int) -> int:
    """Returns how many entries to sample so that enough of them are among the k largest."""
    return math.ceil(max(MIN_SAMPLE_SHARE * n, MIN_HITS * n / k))


def _samples(x: Tensor, k: int) -> bool:
    """Whether a sample is faster: many entries, and k neither too small nor too large."""
    n = x.numel()
    return n >= SORT_ELEMENTS and 4 * _size(n, k) <= n and 4 * k <= n


def _sorted(x: Tensor, k: int) -> Tensor:
    return x.abs().topk(min(k, x.numel()), sorted=False).indices
