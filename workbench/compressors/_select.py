"""Finding the largest entries of a long vector without sorting it: a threshold from a sample, then one pass.

`torch.topk` copies every element with its index and sorts these pairs. Here a sample of the magnitudes says about where
the k-th largest lies, one pass finds what reaches it, and only these few are sorted, if at all. Magnitudes that are
not numbers count as the largest, as in `torch.topk`.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from workbench.rank import outlined

BLOCK = 2**17  # elements that are looked at together: they, their magnitudes and their flags stay in the cache
SHARE = 0.01  # of the entries that are sampled, at least
HITS = 64  # entries of the sample that are among the k largest, at least
SMALL = 2**14  # below so many entries sorting is as fast
LEAST, MOST = 0.98, 1.2  # how many of k `roughly` finds

_EIGHT = 0x0101010101010101  # eight flags that are set


@outlined(lambda x, k: x.new_empty(k, dtype=torch.int64))
def largest(x: Tensor, k: int) -> Tensor:
    """(n,) -> indices (k,) int64 of the k entries of largest magnitude, in any order: `torch.topk`'s, found faster."""
    if not _samples(x, k):
        return _sorted(x, k)
    index = above(x, threshold_of(x, k, spare=4))
    if index.numel() < k or index.numel() > x.numel() // 2:
        return _sorted(x, k)
    return index[_sorted(x[index], k)]


def roughly(x: Tensor, k: int, generator: Generator | None = None) -> Tensor:
    """(n,) -> indices int64 of about the k entries of largest magnitude: those that reach a sampled threshold.

    Between 0.98 k and 1.2 k of them, or all that are not zero where these are fewer; what is left out is never larger
    than what is found. So at least 98 % of the energy of the k largest is found. Where the first threshold lets too few
    pass, a lower one is sampled; of too many, the k largest are taken.
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

    The sample is 1 % of the entries, or more if less than 64 of the k largest would be in it, or all: one drawn from
    each of m stretches of equal length. Its r-th largest is taken, r = k m / n. How many entries reach that spreads
    around k by k / sqrt(r) at most. `spare` aims so many spreads too low: with 4, fewer than k reach it once in ten
    thousand times.
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
    """(n,) -> indices int64, ascending, of the entries whose magnitude is `threshold` or more, or not a number."""
    n = x.numel()
    if x.device.type != "cpu" or n < 2 * BLOCK:
        return unset(x.abs() < threshold)
    below = torch.empty(n, dtype=torch.bool)
    room = torch.empty(BLOCK, dtype=x.dtype)
    for start in range(0, n, BLOCK):
        piece = x[start : start + BLOCK]
        # compared into floats and these copied, for torch compares into flags at a fifth of the speed
        below[start : start + BLOCK].copy_(torch.abs(piece, out=room[: piece.numel()]).lt_(threshold))
    return unset(below)


def unset(flags: Tensor) -> Tensor:
    """(n,) bool -> indices int64, ascending, of those that are False: fast where these are few."""
    whole = flags.numel() // 8 * 8
    if flags.device.type != "cpu" or whole < BLOCK or flags.storage_offset() % 8:
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
    """Entries to sample so that enough of them are among the k largest."""
    return math.ceil(max(SHARE * n, HITS * n / k))


def _samples(x: Tensor, k: int) -> bool:
    """Is a sample worth its while: are there many entries, and are those wanted neither too few nor too many?"""
    n = x.numel()
    return n >= SMALL and 4 * _size(n, k) <= n and 4 * k <= n


def _sorted(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest magnitudes, by `torch.topk`."""
    return x.abs().topk(min(k, x.numel()), sorted=False).indices
