"""DoubleTree: a binary tree for each half of the tensor sums it and copies it back, in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView, alpha_beta
from workbench.fabric.algorithms._trees import rounds
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.rank import Group

MAX_RANK_PIECES = 4096  # ranks times pieces, because ordering hops takes time


@dataclass(frozen=True, kw_only=True)
class DoubleTree(Algorithm):
    """Two binary trees, each for half of the tensor: sums go up to its root and down again.

        in each of R rounds a rank sends and receives at most one piece of n/2k bytes
        time = R (alpha + n/2k beta) + n gamma         R = R1 with one piece (9, 10 and 14 for 7, 8 and 16 ranks),
                                                       about R1 + 6.5 (k-1) with more

    Inner ranks of one tree are leaves of the other, so all ports are busy. Ideally k pieces need about R1 + 4 (k-1)
    rounds. But ranks that have nothing to receive run ahead and delay each other. R is the measured number for 4 to 17
    ranks on a Link, within 20 %. With one piece it is exact.

    When to use it: for a large latency and many ranks, if their number is no power of two. With a power of two
    HalvingDoubling is always faster on a Link, because its ports receive one message at a time.

    Reference: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    Parallel Computing 2009, https://doi.org/10.1016/j.parco.2009.09.001. The trees are those of NCCL 2.4
    (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/)
    """

    pieces: int = knob(0, 0, 256, doc="k: number of pieces of each half; 0: the quickest number")

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        k = self.pieces or 1
        trees = rank.few(rank.ranks, "first tree"), rank.few(rank.ranks, "second tree")
        parts = [half.tensor_split(k) for half in x.tensor_split(2)]
        for hops in rounds(rank.size, k):
            for hop in hops:
                if hop.source == rank.index:
                    await trees[hop.tree].send(parts[hop.tree][hop.piece], hop.to)
            for hop in hops:
                if hop.to == rank.index and hop.up:
                    await trees[hop.tree].add(parts[hop.tree][hop.piece], hop.source)
                elif hop.to == rank.index:
                    await trees[hop.tree].take(parts[hop.tree][hop.piece], hop.source)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        alpha, beta = alpha_beta(fabric, ranks)
        first, more = _rounds(len(ranks))
        k = self.pieces or self._quickest(fabric, ranks, nbytes)
        return (first + more * (k - 1)) * (alpha + nbytes / 2 / k * beta) + nbytes * gamma

    def chosen(self, fabric: FabricView, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        return replace(self, pieces=self.pieces or self._quickest(fabric, ranks, nbytes))

    def _quickest(self, fabric: FabricView, ranks: Sequence[int], nbytes: float) -> int:
        """Returns the k that minimises R = a + b (k-1) rounds: k = sqrt((a-b)/b n/2 beta / alpha)."""
        alpha, beta = alpha_beta(fabric, ranks)
        first, more = _rounds(len(ranks))
        most = max(1, min(64, MAX_RANK_PIECES // len(ranks)))
        if not alpha:
            return most if first > more else 1
        return max(1, min(most, round(sqrt((first - more) / more * nbytes / 2 * beta / alpha))))


def _rounds(size: int) -> tuple[int, float]:
    """Returns the rounds of one piece, and about those of each further piece. See DoubleTree."""
    first = len(rounds(size, 1))
    return first, min(first, 6.5)
