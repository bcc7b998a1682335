"""HalvingDoubling: pairs at doubling distances exchange halves of halves, then return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView, alpha_beta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(Algorithm):
    """Recursive halving and doubling: log p rounds sum ever smaller parts, as many gather them.

        round k:  rank i and its partner at distance 2^k each send the half that the other keeps, and add
        then, from the last round to the first, each sends what it has to the same partner
        time = 2 log2(p) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma                               p a power of two
             + 2 (alpha + n beta) + n gamma           otherwise, with p the next smaller one in the line above

    It sends as few bytes as a ring, in far fewer messages. If p is no power of two, each surplus rank first sends its
    whole tensor to a neighbour and receives the sum at the end. Other ranks then run ahead, and their messages can
    occupy a port too early: a round lasted up to alpha + n/2 beta longer with 6 and 9 ranks. Neighbours exchange the
    largest halves, which suits sites.

    When to use it: for tensors of medium size on a number of ranks that is a power of two.

    Reference: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004. Thakur, Rabenseifner and
    Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005,
    https://doi.org/10.1177/1094342005051521
    """

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        ranks = _powers(rank.size)
        extra = rank.size - len(ranks)
        if rank.index < 2 * extra and rank.index % 2:
            await rank.send(x, rank.index - 1)
            return await rank.take(x, rank.index - 1)
        if rank.index < 2 * extra:
            await rank.add(x, rank.index + 1)
        i, d, mine, gave = ranks.index(rank.index), 1, x, []
        while d < len(ranks):
            partner, halves = ranks[i ^ d], mine.tensor_split(2)
            mine, theirs = halves if i & d == 0 else halves[::-1]
            await rank.send(theirs, partner)
            await rank.add(mine, partner)
            gave.append((partner, mine, theirs))
            d *= 2
        for partner, mine, theirs in reversed(gave):
            await rank.send(mine, partner)
            await rank.take(theirs, partner)
        if rank.index < 2 * extra:
            await rank.send(x, rank.index + 1)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        fabric = fabric.split_port(len(ranks))
        stay, n, total, d = _powers(len(ranks)), nbytes, 0.0, 1
        while d < len(stay):
            pairs = [sorted((ranks[stay[i]], ranks[stay[i ^ d]])) for i in range(len(stay))]
            n /= 2
            total += max(2 * _message(fabric, pair, n) for pair in pairs) + n * gamma
            d *= 2
        if extra := len(ranks) - len(stay):
            pairs = [[ranks[2 * i], ranks[2 * i + 1]] for i in range(extra)]
            total += max(2 * _message(fabric, pair, nbytes) for pair in pairs) + nbytes * gamma
        return total


def _powers(size: int) -> list[int]:
    """Returns the participants, a power of two: all except the first odd ranks."""
    extra = size - (1 << size.bit_length() - 1)
    return [*range(0, 2 * extra, 2), *range(2 * extra, size)]


def _message(fabric: FabricView, pair: Sequence[int], nbytes: float) -> float:
    alpha, beta = alpha_beta(fabric, pair)
    return alpha + nbytes * beta
