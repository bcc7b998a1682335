"""Ring: chunks go around a ring twice, to be summed and then to be gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView, alpha_beta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ring(Algorithm):
    """Chunks of the tensor go around a ring of all ranks: a reduce-scatter, then an all-gather.

        time = 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma

    Each rank sends 2 (p-1)/p of the bytes in 2 (p-1) consecutive messages. No algorithm sends fewer bytes. If the ring
    leaves a site, its slowest hop delays all ranks.

    When to use it: for large tensors, because no algorithm sends less. With many ranks and a large latency it is the
    slowest.

    Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002
    """

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        p, i, chunks = rank.size, rank.index, x.tensor_split(rank.size)
        right, left = (i + 1) % p, (i - 1) % p
        for t in range(p - 1):
            await rank.send(chunks[(i - t) % p], right)
            await rank.add(chunks[(i - t - 1) % p], left)
        for t in range(p - 1):
            await rank.send(chunks[(i + 1 - t) % p], right)
            await rank.take(chunks[(i - t) % p], left)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        p, (alpha, beta) = len(ranks), alpha_beta(fabric, ranks)
        return 2 * (p - 1) * (alpha + nbytes / p * beta) + (p - 1) / p * nbytes * gamma
