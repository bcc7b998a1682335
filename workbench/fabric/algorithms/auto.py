"""Auto: the algorithm with the shortest predicted time for these ranks and this size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView
from workbench.fabric.algorithms.double_tree import DoubleTree
from workbench.fabric.algorithms.halving_doubling import HalvingDoubling
from workbench.fabric.algorithms.hierarchical import Hierarchical
from workbench.fabric.algorithms.parameter_server import ParameterServer
from workbench.fabric.algorithms.ring import Ring
from workbench.fabric.algorithms.two_level import TwoLevel
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.rank import Group


@dataclass(frozen=True, kw_only=True)
class Auto(Algorithm):
    """For each size and group, chooses the algorithm whose cost model predicts the shortest time.

    The prediction uses the Link and the settings between sites. If no network is emulated, give the measured latency
    and bandwidth (`Costs.measured(run).wire`). Otherwise it takes the first algorithm: Ring. Every rank has the same
    numbers, so all choose alike.

    When to use it: for mixed sizes, such as a small last bucket or norms. It also shows at which size another algorithm
    wins.

    Reference: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
    2005, https://doi.org/10.1177/1094342005051521, which switches by size in this way
    """

    latency: float = knob(0.0, 0.0, 1000.0, unit="ms", doc="measured latency of a message; 0: the Link's")
    bandwidth: float = knob(0.0, 0.0, 1e6, unit="Mbit/s", log=True, doc="measured bandwidth of a port; 0: the Link's")
    gamma: float = knob(0.0, 0.0, 1000.0, unit="ns", doc="measured time to add one byte; 0: none")

    def chosen(self, fabric: FabricView, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        return _quickest(self, fabric, group, tuple(ranks), nbytes)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        there = self._fabric(fabric)
        return min(way.seconds(there, ranks, nbytes, gamma or self.gamma * 1e-9) for way in _ways(there, ranks))

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        raise NotImplementedError("call the algorithm that `chosen` returns")

    def _fabric(self, fabric: FabricView) -> FabricView:
        return fabric.measured(self.latency, self.bandwidth) if self.latency or self.bandwidth else fabric


@lru_cache(maxsize=4096)
def _quickest(auto: Auto, fabric: FabricView, group: Group | None, ranks: tuple[int, ...], nbytes: int) -> Algorithm:
    there = auto._fabric(fabric)
    best = min(_ways(there, ranks), key=lambda way: way.seconds(there, ranks, nbytes, auto.gamma * 1e-9))
    return best.chosen(there, group, ranks, nbytes)


def _ways(fabric: FabricView, ranks: Sequence[int]) -> list[Algorithm]:
    flat = [Ring(), HalvingDoubling(), DoubleTree(), ParameterServer()]
    if not fabric.crosses(ranks):
        return flat
    return [*flat, *(kind(between=way) for kind in (TwoLevel, Hierarchical) for way in flat[:3])]
