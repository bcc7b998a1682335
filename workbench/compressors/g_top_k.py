"""gTop-k: ranks merge their largest entries in pairs until all hold the same k of the sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._range import wide, within
from workbench.compressors._sparse import message, opened
from workbench.compressors._two_hop import packed, unpacked
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob

Pairs = tuple[tuple[int, int], ...]  # (sender, receiver)


@dataclass(frozen=True, kw_only=True)
class GTopK(Compressor):
    """Gives ranks only about the k = density * n largest entries of the sum, in log2(p) rounds of pairs.

        own_i = the k largest |entries| of x_i;   in round r = 0, 1, ... with the rank whose number differs in bit r:
        own_i <- the k largest |entries| of own_i + own_partner

    Each round doubles the number of ranks with the same k entries; after the last round all ranks have them. If a round
    drops an entry, every rank that contributed to it takes its part back. Each rank tracks its own entries from round
    to round. Its contribution is the entries that stayed in every sum. A dropped entry may return from other ranks,
    without the first ranks' part. (The authors' code compares only with the result, so a rank also clears entries that
    never arrived.)

    Bytes sent per rank in fp32: 8 k log2(p), for at most k pairs of index and value at a time. The result is as sparse
    as the input. Let q be the largest power of 2 up to p. The p - q ranks beyond q first send their entries to ranks 0,
    1 and so on. At the end they receive the result and one bit per entry. They send 8 k, and their partners 8 k + k / 8
    more. The search among 2 k entries per round is cheap next to the first search. The result is not the exact top-k of
    the sum: an entry that is small on every rank is never sent. It is exact with 2 ranks and disjoint entries.

    It wants error feedback: the bare name GTopK means ErrorFeedback(of=GTopK()).

    When to use it: TopK on many ranks, where gathering all entries costs (p-1) * 8 k.

    Reference: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
    Networks", ICDCS 2019, https://arxiv.org/abs/1901.04359
    """

    density: float = knob(
        0.01, 0.0001, 1.0, log=True, doc="fraction of the entries that are sent, and that the sum keeps"
    )

    kind: ClassVar[str] = "sparse"

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x, me = bucket.data, rank.index
        if not x.numel():
            return None
        k = max(1, round(self.density * x.numel()))
        index = x.abs().topk(k, sorted=False).indices
        held, mine = _Held(index, x[index]), x[index]
        q = 1 << (rank.size.bit_length() - 1)  # the largest power of 2 up to p
        beyond = range(q, rank.size)
        if came := await _passed(rank, bucket, held.message(), tuple((r, r - q) for r in beyond)):
            held.take_for(*opened(came[0], x.dtype))
        bit = 1
        while bit < q:
            if came := await _passed(rank, bucket, held.message(), tuple((r, r ^ bit) for r in range(q))):
                held.take_in(*opened(came[0], x.dtype), me_first=not me & bit, share=0.5 / bit)
            bit *= 2
        if came := await _passed(rank, bucket, held.answer(), tuple((r - q, r) for r in beyond)):
            held.replace(came[0], x.dtype)
        x.zero_()
        x[held.index] = held.values
        own = torch.zeros_like(x, dtype=held.lost.dtype)
        own.index_copy_(0, index, torch.where(held.alive[0], mine, 0.0).to(own.dtype))
        return own.index_add_(0, held.index, held.lost, alpha=-1)


class _Held:
    """k entries of a sum, and flags for the ranks' initial entries that are still in it."""

    def __init__(self, index: Tensor, values: Tensor) -> None:
        self.index, self.values = index, values
        self.lost = torch.zeros_like(values, dtype=wide(values.dtype))  # this rank's share of what `values` cannot hold
        self.began = [index]  # this rank's own entries, and those of a rank beyond q that joined it
        self.alive = [torch.ones_like(index, dtype=torch.bool)]

    def message(self) -> Tensor:
        return message(self.index, self.values)

    def take_for(self, index: Tensor, values: Tensor) -> None:
        """Adds the entries of a rank beyond q, which later receives an `answer`."""
        self.began.append(index)
        self.alive.append(torch.ones_like(index, dtype=torch.bool))
        self.take_in(index, values, me_first=True, share=1.0)

    @outlined(lambda self, index, values, me_first, share: None)  # the number stays the same
    def take_in(self, index: Tensor, values: Tensor, me_first: bool, share: float) -> None:
        """Adds another rank's entries and keeps the k largest. The lower rank's come first: bit-identical results.

        share: 1 / the number of ranks that get this sum and count what its dtype cannot hold
        """
        both = [(self.index, self.values), (index, values)][:: 1 if me_first else -1]
        places, where = torch.cat([i for i, _ in both]).unique(return_inverse=True)
        added = torch.cat([v for _, v in both]).to(wide(values.dtype))
        exact = added.new_zeros(len(places)).index_add_(0, where, added)
        sums = within(exact, values.dtype)
        lost = torch.where(sums.isfinite(), exact - sums, 0.0).mul_(share)
        lost.index_add_(0, torch.searchsorted(places, self.index), self.lost)
        best = sums.abs().sort(descending=True, stable=True).indices[: len(values)].sort().values
        self.index, self.values, self.lost = places[best], sums[best], lost[best]
        self.alive = [a & torch.isin(b, self.index) for a, b in zip(self.alive, self.began, strict=True)]

    def answer(self) -> Tensor:
        """The reply to a rank beyond q: the result, and one bit for each of its entries."""
        bits = packed(self.alive[-1].to(torch.uint8)[None], 1)[0]
        return torch.cat([self.message(), bits])

    def replace(self, answer: Tensor, dtype: torch.dtype) -> None:
        """Takes over the result from an `answer`."""
        k = len(self.index)
        pairs, bits = answer.split([k * (4 + dtype.itemsize), -(-k // 8)])
        self.index, self.values = opened(pairs, dtype)
        self.lost = torch.zeros_like(self.lost)  # its partner counts that
        self.alive = [unpacked(bits[None], 1, k)[0].bool()]


async def _passed(rank: Rank, bucket: Bucket, data: Tensor, pairs: Pairs) -> list[Tensor]:
    """Sends `data` along all `pairs` at once. Returns the data that came for this rank, or None."""
    if not pairs:
        return []
    to, senders = dict(pairs).get(rank.index), [i for i, j in pairs if j == rank.index]
    rows = [data if j == to else data[:0] for j in range(rank.size)]
    got = await rank.all_to_allv(rows, _lengths(rank.size, pairs, data.numel()), bucket.name)
    return [got[i] for i in senders]


@lru_cache(maxsize=256)
def _lengths(size: int, pairs: Pairs, nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Bytes from each rank to each rank; cached for all virtual ranks of a simulation."""
    to = dict(pairs)
    return tuple(tuple(nbytes * (to.get(i) == j) for j in range(size)) for i in range(size))
