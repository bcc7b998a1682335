"""TwoLevel: a tree sums each site to its leader. Leaders sum, and the sum goes back down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView, alpha_beta
from workbench.fabric.algorithms._sites import group_by_site, refuse_between
from workbench.fabric.algorithms.ring import Ring
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.rank import Group


@dataclass(frozen=True, kw_only=True)
class TwoLevel(Algorithm):
    """A tree of leaders: ranks sum along a tree to their site's leader, then leaders sum.

        inside:    ceil(log2 g) rounds along a binomial tree; in each, half of the remaining ranks send all they have
        between:   an all-reduce of the m leaders, by an algorithm of its own
        inside:    the same tree, from the leader down
        time = 2 ceil(log2 g) (alpha + n beta + n gamma / 2) + that of n bytes among m leaders

    Only the m leaders send to other sites. A ring of them waits for the latency between sites 2 (m-1) times, a flat
    ring of all p ranks 2 (p-1) times. But every message has the whole tensor. Hierarchical splits the tensor inside the
    site first, as Horovod's hierarchical all-reduce does.

    When to use it: for small tensors, sites of four or more ranks and a large latency between sites. On smaller sites
    Hierarchical is at least as fast for every size. `fabric.site` sets the size of a site.

    Reference: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision: Training ImageNet in
    Four Minutes", 2018, https://arxiv.org/abs/1807.11205 (hierarchical all-reduce with one master per group)
    """

    between: Algorithm = knob(Ring(), doc="how leaders sum among themselves")
    site: int = knob(0, 0, 4096, unit="ranks", doc="neighbours on a site; 0: the Fabric's `site`")

    def refuses(self) -> str | None:
        return refuse_between("TwoLevel", self.between)

    def chosen(self, fabric: FabricView, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        leaders, between = [site[0] for site in self._sites(fabric, ranks)], self.between
        if len(leaders) > 1:
            between = between.chosen(fabric.split_port(len(ranks)), None, leaders, nbytes)
        return replace(self, site=self.site or fabric.site or ranks[-1] + 1, between=between)

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        sites = group_by_site(self.site, rank.ranks)
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

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        sites, fabric = self._sites(fabric, ranks), fabric.split_port(len(ranks))
        inside = [(len(site), *alpha_beta(fabric, site)) for site in sites]
        total = max((g - 1).bit_length() * (2 * (alpha + nbytes * beta) + nbytes * gamma) for g, alpha, beta in inside)
        leaders = [site[0] for site in sites]
        return total + (self.between.seconds(fabric, leaders, nbytes, gamma) if len(leaders) > 1 else 0.0)

    def _sites(self, fabric: FabricView, ranks: Sequence[int]) -> list[list[int]]:
        return group_by_site(self.site or fabric.site or ranks[-1] + 1, ranks)


def _binomial(i: int, size: int) -> tuple[int | None, list[int]]:
    """Returns a rank's parent in a binomial tree with root 0, and its children as they finish."""
    lowest = i & -i if i else 1 << size.bit_length()
    children = [i + d for d in (1 << k for k in range(lowest.bit_length() - 1)) if i + d < size]
    return (i - lowest if i else None), children
