"""ParameterServer: one rank sums the tensors, or each rank its own part, and returns the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView, alpha_beta
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Algorithm):
    """The first ranks serve a part of the tensor each, and return the sum to the other ranks.

        time = 2 (p-1) (alpha + n/s beta) + (p-1) n/s gamma                                  s = 1 server, or s = p

    The servers train as well. One server's port takes the tensors of p - 1 ranks, in both directions. As many servers
    as ranks take as long as a ring. In round t rank i sends to rank i + t, so no two ranks send to one port at a time.
    SyncServer and AsyncServer have servers that do not train.

    When to use it: to see the bottleneck that rings remove, and the effect of several servers.

    Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
    https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu
    """

    every: bool = knob(False, doc="each rank serves one part; false: the first rank serves all")

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        p, i = rank.size, rank.index
        parts = x.tensor_split(p if self.every else 1)
        s = len(parts)
        for t in range(1, p):
            if (i + t) % p < s:
                await rank.send(parts[(i + t) % p], (i + t) % p)
            if i < s:
                await rank.add(parts[i], (i - t) % p)
        for t in range(1, p):
            if i < s:
                await rank.send(parts[i], (i + t) % p)
            if (i - t) % p < s:
                await rank.take(parts[(i - t) % p], (i - t) % p)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        p, part = len(ranks), nbytes / (len(ranks) if self.every else 1)
        alpha, beta = alpha_beta(fabric, ranks)
        return (p - 1) * (2 * (alpha + part * beta) + part * gamma)
