"""TwoLevel: sums are made inside each site first, then among one rank of each, and then handed out inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, alpha_beta, parted
from workbench.fabric.algorithms.by_group import ByGroup
from workbench.fabric.algorithms.ring import Ring
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.fabric.link import Fabric
    from workbench.rank import Group


@dataclass(frozen=True, kw_only=True)
class TwoLevel(Algorithm):
    """Inside a site sums go to its leader, leaders sum among themselves, and each hands the sum out in its site.

        inside:    ceil(log2 g) rounds along a binomial tree, in which half of the ranks left send all they have
        between:   an all-reduce of the m leaders, by an algorithm of its own
        inside:    the tree the other way
        time = 2 ceil(log2 g) (alpha + n beta + n gamma / 2) + that of m leaders between sites

    Of g ranks on a site one sends to other sites, so it is the latency between sites that is saved: m - 1 messages go
    around where p - 1 would. A flat ring sends no more bytes through a port, and inside each rank sends all it has.

    When to use it: several sites with a large latency between them. `fabric.site` says how large they are.

    Reference: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision: Training ImageNet in
    Four Minutes", 2018, https://arxiv.org/abs/1807.11205 (hierarchical all-reduce)
    """

    between: Algorithm = knob(Ring(), doc="how leaders sum among themselves")
    site: int = knob(0, 0, 4096, unit="ranks", doc="neighbours on a site; 0: as the Fabric says")

    def refuses(self) -> str | None:
        if self.between.native:
            return "TwoLevel.between=Native(): the backend's own way has no messages; take Ring()"
        if isinstance(self.between, ByGroup):
            return "TwoLevel.between=ByGroup(): leaders of sites are no group of the mesh; take Ring()"
        return self.between.refuses()

    def chosen(self, fabric: Fabric, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        leaders, between = [site[0] for site in self._sites(fabric, ranks)], self.between
        if len(leaders) > 1:
            between = between.chosen(parted(fabric, len(ranks)), None, leaders, nbytes)
        return replace(self, site=self.site or fabric.site or ranks[-1] + 1, between=between)

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        sites = _sites(self.site, rank.ranks)
        here = rank.few(next(site for site in sites if rank.rank.id in site), "inside")
        parent, children = _binomial(here.index, here.size)
        for child in children:
            await here.add(x, child)
        if parent is not None:
            await here.send(x, parent)
            await here.take(x, parent)
        elif len(sites) > 1:
            await self.between.all_reduce(rank.few([site[0] for site in sites], "between"), x)
        for child in reversed(children):
            await here.send(x, child)

    def seconds(self, fabric: Fabric, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        sites, fabric = self._sites(fabric, ranks), parted(fabric, len(ranks))
        inside = [(len(site), *alpha_beta(fabric, site)) for site in sites]
        total = max((g - 1).bit_length() * (2 * (alpha + nbytes * beta) + nbytes * gamma) for g, alpha, beta in inside)
        leaders = [site[0] for site in sites]
        return total + (self.between.seconds(fabric, leaders, nbytes, gamma) if len(leaders) > 1 else 0.0)

    def _sites(self, fabric: Fabric, ranks: Sequence[int]) -> list[list[int]]:
        return _sites(self.site or fabric.site or ranks[-1] + 1, ranks)


def _sites(site: int, ranks: Sequence[int]) -> list[list[int]]:
    """`ranks` by the site on which they are."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // site, []).append(rank)
    return list(found.values())


def _binomial(i: int, size: int) -> tuple[int | None, list[int]]:
    """A rank's parent in a binomial tree with root 0, and its children in the order in which they are ready."""
    lowest = i & -i if i else 1 << size.bit_length()
    children = [i + d for d in (1 << k for k in range(lowest.bit_length() - 1)) if i + d < size]
    return (i - lowest if i else None), children
