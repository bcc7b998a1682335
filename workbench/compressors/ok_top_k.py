"""Ok-Topk: ranks add up regions of their entries and share those above a common threshold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import wide, within
from workbench.compressors._sparse import message, opened
from workbench.compressors._uneven import lengths_of
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob

Lengths = tuple[tuple[int, ...], ...]

FEW, MANY = 0.75, 1.25  # factors of k: beyond them a reused threshold moves
LOCAL, LOWER, RAISE = 1.012, 1.01, 1.008  # factors of a move: a rank's own either way, the common one down and up
STALE_FACTOR = 2.0  # beyond k / 2 and 2 k a threshold is searched again


@dataclass(frozen=True, kw_only=True)
class OkTopK(Compressor):
    """Gives all ranks about the k = density * n largest entries of the sum, for less than 6 k numbers at any p.

        choose    rank i: I_i = { |x_i| >= its threshold }, about k entries
        reduce    the pairs of I_i in region j -> rank j, which adds up;  p regions of about k / p entries on each rank
        select    rank j: those of its sums with |sum| >= the common threshold, about k over all regions
        balance   what was selected moves so that each rank has as much, and every rank gathers every other's

    A threshold is the k-th largest magnitude. Every `threshold_every` steps it is searched exactly. Other steps reuse
    it, because magnitudes change slowly and one comparison per entry is cheaper than a search. An exact common
    threshold needs the sums of all regions (at most the k largest of each). These are also that step's result. A reused
    threshold moves by about 1 % if less than 3/4 k or more than 5/4 k entries reach it. The authors' code does the
    same. Unlike theirs, it is searched again at once below k / 2 and above 2 k. Every `region_every` steps regions are
    cut at the ranks' mean p-quantiles of their entries' places. With `threshold_every` = 1 the result is exact: the
    top-k of the sum of all top-k.

    A rank contributes its chosen entries that survive and keeps the other ones. So it wants error feedback: the bare
    name OkTopK means ErrorFeedback(of=OkTopK()). If p or the bucket's parameters change, thresholds and regions are
    measured again. If the density changes, thresholds are.

    Bytes sent per rank with reused thresholds and 4 bytes per number: 8 k (p-1)/p to the regions' owners and 8 k
    (p-1)/p to gather. Balancing takes at most as much as the first part. Lengths add 8 (p-1) (p+2). A cut of regions
    adds an all-reduce of p - 1 numbers. A step with a new common threshold sends 8 k (p-1)/p and up to 8 k (p-1). The
    Sample "density" is the number of sent pairs divided by n and by 2 (p-1)/p. A balanced pair travels that often.
    Indices are integers. (The authors' code sends fp32, exact up to 2^24 only.)

    When to use it: TopK on many ranks with large layers. On small layers lengths and latencies weigh more. The authors
    train the first steps densely, as a WarmUp around it does.

    Reference: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022,
    https://arxiv.org/abs/2201.07598, and its code, https://github.com/Shigangli/Ok-Topk
    """

    density: float = knob(
        0.01, 0.0001, 1.0, log=True, doc="fraction of the entries that are sent, and that the sum keeps"
    )
    threshold_every: int = knob(32, 1, 4096, unit="steps", log=True, doc="steps that reuse a threshold")
    region_every: int = knob(64, 1, 4096, unit="steps", log=True, doc="steps that reuse the regions")

    varies: ClassVar[bool] = True
    buffer: ClassVar[str] = "ok_top_k"
    drops: ClassVar[tuple[str, ...]] = ("ok_top_k",)
    kind: ClassVar[str] = "sparse"

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    async def _supposed(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        """Exchanges sizes only, for a share of `rank.density`: half before and half after selection."""
        x, p = bucket.data, rank.size
        if not x.numel():
            return None
        known = self._recalled(rank, bucket, memory)
        if known.steps % self.region_every == 0 and p > 1:
            await rank.all_reduce(x.new_empty(p - 1, dtype=torch.int64), "sum", bucket.name)
        known.steps += 1
        pairs = round(rank.density * x.numel() * _travels(rank))
        for share, entries in ((pairs // 2, p), (pairs - pairs // 2, 2)):
            await lengths_of(rank, [0] * entries, x, bucket.name)
            lengths = _ring(p, share, 4 + x.element_size())
            rows = [x.new_empty(n, dtype=torch.uint8) for n in lengths[rank.index]]
            await rank.all_to_allv(rows, lengths, bucket.name)
        return torch.zeros_like(x)

    @outlined(_supposed)
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x = bucket.data
        if not x.numel():
            return None
        known = self._recalled(rank, bucket, memory)
        k = max(1, round(self.density * x.numel()))
        anew = known.steps % self.threshold_every == 0 or known.density != self.density
        chosen = self._chosen(x, k, known, anew)
        if known.steps % self.region_every == 0 and rank.size > 1:
            known.cuts = await _cuts(rank, bucket, chosen)
        known.steps, known.density = known.steps + 1, self.density
        total, lost, sent = await _added_up(rank, bucket, chosen, known.cuts)
        index, values, handed = await self._handed_round(rank, bucket, total, k, known, anew)
        if rank.size > 1:
            await rank.sample("density", (sent + handed) / (x.numel() * _travels(rank)))
        own = torch.zeros_like(x, dtype=wide(x.dtype))
        arrived = torch.zeros_like(x, dtype=torch.bool)
        arrived[index] = True
        chosen = chosen[arrived[chosen]]
        own[chosen] = x[chosen].to(own.dtype)
        own[total.index] -= torch.where(arrived[total.index], lost, 0.0)
        x.zero_()
        x[index] = values
        return own

    def _recalled(self, rank: Rank, bucket: Bucket, memory: Memory) -> _Known:
        """Returns the state of these parameters on this number of ranks; new after a change."""
        of = (rank.size, *bucket.parts)
        kept = memory.parts.setdefault(self.buffer, {})
        name = bucket.parts[0].name if bucket.parts else ""
        if name not in kept or kept[name].of != of:
            kept[name] = _Known(of)
        known: _Known = kept[name]
        return known

    def _chosen(self, x: Tensor, k: int, known: _Known, anew: bool) -> Tensor:
        """Returns indices (about k) of this rank's own entries, ascending."""
        size = _magnitude(x)
        index = None if anew else _above(size, known.own)
        if index is None or _stale(len(index), k):
            known.own = _limit(size, k)
            return _largest(size, known.own, k)
        known.own = _moved(known.own, len(index), k, LOCAL, LOCAL)
        return index

    async def _handed_round(self, rank: Rank, bucket: Bucket, total: _Pairs, k: int, known: _Known,
                            anew: bool) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        """Returns the selected pairs, equal on every rank, and the number of pairs that this rank sent."""
        size = _magnitude(total.values)
        some = total.at(_above(size, known.common))
        most = total.at(_above(size, _limit(size, k)))
        counts = await lengths_of(rank, [len(some), len(most)], bucket.data, bucket.name)
        through = sum(c for c, _ in counts)
        if not anew and not _stale(through, k):
            known.common = _moved(known.common, through, k, LOWER, RAISE)
            return await _balanced(rank, bucket, some, [c for c, _ in counts])
        every = await _sent_to_all(rank, bucket, most, [c for _, c in counts])
        size = _magnitude(every.values)
        known.common = _limit(size, k)
        every = every.at(_largest(size, known.common, k))
        return every.index, every.values, (rank.size - 1) * len(most)


class _Known:
    """State that some steps measure and other steps reuse."""

    def __init__(self, of: tuple[Any, ...]) -> None:
        self.of = of  # ranks and parameters
        self.density = 0.0
        self.steps = 0
        self.own = self.common = 0.0  # thresholds
        self.cuts: list[int] = []  # starts of regions 1, 2, ...


class _Pairs:
    """Indices `(m,)`, ascending, and their values."""

    def __init__(self, index: Tensor, values: Tensor) -> None:
        self.index, self.values = index, values

    def __len__(self) -> int:
        return len(self.index)

    def at(self, which: Tensor) -> _Pairs:
        return _Pairs(self.index[which], self.values[which])

    def rows(self, lengths: tuple[int, ...]) -> list[Tensor]:
        """Cuts the pairs into messages of these lengths."""
        return [message(i, v) for i, v in zip(self.index.split(lengths), self.values.split(lengths), strict=True)]


def _magnitude(x: Tensor) -> Tensor:
    """Returns |x|. NaN becomes infinity, so that it is sent."""
    return x.abs().nan_to_num_(torch.inf, torch.inf)


def _limit(size: Tensor, k: int) -> float:
    """The k-th largest finite magnitude; 0 if there are none."""
    if not len(size):
        return 0.0
    finite = torch.where(size < torch.inf, size, 0.0)
    return float(finite.topk(min(k, len(size)), sorted=False).values.amin())


def _above(size: Tensor, limit: float) -> Tensor:
    """Indices of nonzero magnitudes of at least `limit`."""
    return ((size >= limit) & (size > 0)).nonzero().flatten()


def _largest(size: Tensor, limit: float, k: int) -> Tensor:
    """As `_above`, but only k of them if far too many are equal."""
    index = _above(size, limit)
    if len(index) <= STALE_FACTOR * k:
        return index
    return size.sort(descending=True, stable=True).indices[:k].sort().values


def _stale(count: int, k: int) -> bool:
    return not k / STALE_FACTOR <= count <= k * STALE_FACTOR


def _moved(limit: float, count: int, k: int, lower: float, higher: float) -> float:
    """A threshold for the next step, after `count` entries reached it."""
    if count < FEW * k:
        return limit / lower
    return limit * higher if count > MANY * k else limit


async def _cuts(rank: Rank, bucket: Bucket, chosen: Tensor) -> list[int]:
    """Starts of regions: the mean over ranks of the p-quantiles of each rank's chosen indices."""
    n, p, m = bucket.data.numel(), rank.size, len(chosen)
    share = torch.arange(1, p, device=chosen.device)
    mine = chosen[share * m // p] if m else share * n // p
    total = await rank.all_reduce(mine, "sum", bucket.name)
    cuts: list[int] = (total // p).tolist()
    return cuts


async def _added_up(rank: Rank, bucket: Bucket, chosen: Tensor, cuts: list[int]) -> tuple[_Pairs, Tensor, int]:
    """Returns this rank's region: its nonzero sums, what their dtype cannot hold, and the number of pairs sent."""
    x, me = bucket.data, rank.index
    ends = [0, *torch.searchsorted(chosen, chosen.new_tensor(cuts)).tolist(), len(chosen)]
    counts = tuple(b - a for a, b in pairwise(ends))
    lengths = await lengths_of(rank, list(counts), x, bucket.name)
    rows = _Pairs(chosen, x[chosen]).rows(counts)
    start, stop = [0, *cuts, x.numel()][me : me + 2]
    sums = x.new_zeros(stop - start, dtype=wide(x.dtype))
    for one in await rank.all_to_allv(rows, _wide(lengths, x), bucket.name):
        index, values = opened(one, x.dtype)
        sums.index_add_(0, index - start, values.to(sums.dtype))
    total = within(sums, x.dtype)
    found = total.ne(0).nonzero().flatten()
    lost = torch.where(total.isfinite(), sums - total, 0.0)[found]
    return _Pairs(found + start, total[found]), lost, sum(counts) - counts[me]


async def _balanced(rank: Rank, bucket: Bucket, some: _Pairs, counts: list[int]) -> tuple[Tensor, Tensor, int]:
    """Balances the pairs over ranks and gathers them; also returns how many this rank sent."""
    p, me = rank.size, rank.index
    ends, all_ = [0, *accumulate(counts)], sum(counts)
    blocks = [all_ * j // p for j in range(p + 1)]
    lengths = tuple(
        tuple(max(0, min(ends[i + 1], blocks[j + 1]) - max(ends[i], blocks[j])) for j in range(p)) for i in range(p)
    )
    moved = sum(lengths[me]) - lengths[me][me]
    if any(lengths[i][j] for i in range(p) for j in range(p) if i != j):
        got = await rank.all_to_allv(some.rows(lengths[me]), _wide(lengths, bucket.data), bucket.name)
        some = _joined(got, bucket.data.dtype)
    every = await _sent_to_all(rank, bucket, some, [b - a for a, b in pairwise(blocks)])
    return every.index, every.values, moved + (p - 1) * len(some)


async def _sent_to_all(rank: Rank, bucket: Bucket, mine: _Pairs, counts: list[int]) -> _Pairs:
    """Returns every rank's pairs in rank order. Rank i has counts[i]."""
    row = message(mine.index, mine.values)
    lengths = tuple((c,) * rank.size for c in counts)
    got = await rank.all_to_allv([row] * rank.size, _wide(lengths, bucket.data), bucket.name)
    return _joined(got[: rank.size], bucket.data.dtype)


def _joined(rows: list[Tensor], dtype: torch.dtype) -> _Pairs:
    index, values = zip(*(opened(row, dtype) for row in rows), strict=True)
    return _Pairs(torch.cat(index), torch.cat(values))


def _wide(lengths: Lengths, like: Tensor) -> Lengths:
    return tuple(tuple(n * (4 + like.element_size()) for n in row) for row in lengths)


def _travels(rank: Rank) -> float:
    """How often a kept pair leaves a rank with equal regions: once to its owner, once to all."""
    return 2 * (rank.size - 1) / rank.size


@lru_cache(maxsize=256)
def _ring(p: int, pairs: int, width: int) -> Lengths:
    """Bytes between ranks if each sends `pairs` pairs as evenly as possible. Cached for all virtual ranks."""
    part = [0, *(pairs * (d + 1) // max(1, p - 1) - pairs * d // max(1, p - 1) for d in range(p - 1))]
    return tuple(tuple(width * part[(j - i) % p] for j in range(p)) for i in range(p))
