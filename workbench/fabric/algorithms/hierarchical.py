"""Hierarchical: sums parts inside each site and then between sites, then gathers inside."""

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
class Hierarchical(Algorithm):
    """Each rank sums one part inside its site and then between sites. The site gathers the parts.

        inside:    reduce-scatter around a ring of the site's g ranks: rank i ends with part i of g
        between:   all-reduce of part i among the i-th ranks of all m sites, for all parts at the same time
        inside:    all-gather around the same ring
        time = (g-1) (2 (alpha + n/g beta) + n/g gamma) + that of n/g bytes among m ranks, one of each site

    Every rank's port works in all three phases. Between sites a port sends 2 (m-1)/m n/g bytes with Ring(). A leader's
    port in TwoLevel sends g times as many.

    If the sites have different sizes, the tensor has as many parts as the smallest site has ranks. This number k
    replaces g in n/g. Ranks without a part still pass parts around the ring. A site of one rank makes k = 1: then every
    message has the whole tensor. Small sites begin to send between sites early. They can block a port that a larger
    site still needs, for up to one message between sites more than the formula in the simulator. With a single site
    this is a Ring.

    When to use it: large tensors, and machines of equal size with fast links inside. If the number of ranks and the
    size of a site are powers of two, HalvingDoubling sends the same bytes in fewer messages.

    Reference: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018,
    https://arxiv.org/abs/1811.05233 (2D-Torus all-reduce: the same three phases). Jia et al., "Highly Scalable Deep
    Learning Training System with Mixed-Precision: Training ImageNet in Four Minutes", 2018,
    https://arxiv.org/abs/1807.11205, describes the variant with one leader per group, which is TwoLevel here
    """

    between: Algorithm = knob(Ring(), doc="how the owners of a part sum it between sites")
    site: int = knob(0, 0, 4096, unit="ranks", doc="neighbours on a site; 0: the Fabric's `site`")

    def refuses(self) -> str | None:
        return refuse_between("Hierarchical", self.between)

    def chosen(self, fabric: FabricView, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        sites, between = self._sites(fabric, ranks), self.between
        if len(sites) > 1:
            owners = _owners(sites)
            between = between.chosen(fabric.split_port(len(ranks)), None, owners[0], -(-nbytes // len(owners)))
        return replace(self, site=self.site or fabric.site or ranks[-1] + 1, between=between)

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        sites = group_by_site(self.site, rank.ranks)
        owners = _owners(sites)
        parts = x.tensor_split(len(owners))
        inside = rank.few(next(site for site in sites if rank.rank.id in site), "inside")
        g, i, k = inside.size, inside.index, len(parts)
        right, left = (i + 1) % g, (i - 1) % g
        for t in range(g - 1):
            if (send := (i - t - 1) % g) < k:
                await inside.send(parts[send], right)
            if (add := (i - t - 2) % g) < k:
                await inside.add(parts[add], left)
        if len(sites) > 1 and i < k:
            await self.between.all_reduce(rank.few(owners[i], "between"), parts[i])
        for t in range(g - 1):
            if (send := (i - t) % g) < k:
                await inside.send(parts[send], right)
            if (take := (i - t - 1) % g) < k:
                await inside.take(parts[take], left)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        sites, fabric = self._sites(fabric, ranks), fabric.split_port(len(ranks))
        owners = _owners(sites)
        part = nbytes / len(owners)
        inside = [(len(site), *alpha_beta(fabric, site)) for site in sites]
        total = max((g - 1) * (2 * (alpha + part * beta) + part * gamma) for g, alpha, beta in inside)
        if len(sites) == 1:
            return total
        return total + max(self.between.seconds(fabric, each, part, gamma) for each in owners)

    def _sites(self, fabric: FabricView, ranks: Sequence[int]) -> list[list[int]]:
        return group_by_site(self.site or fabric.site or ranks[-1] + 1, ranks)


def _owners(sites: list[list[int]]) -> list[list[int]]:
    """By part: the rank of each site that owns it. The smallest site owns one part per rank."""
    return [[site[i] for site in sites] for i in range(min(map(len, sites)))]
