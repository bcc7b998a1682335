"""Splits ranks into sites of neighbours when the mesh has no such dimension."""

from __future__ import annotations

from workbench.rank.mesh import Group
from workbench.rank.rank import Member, Rank


def sites(rank: Rank, of: int) -> tuple[Rank, Rank | None]:
    """Returns `rank` among the `of` neighbours of its site, and among each site's first rank.

    The second is None unless `rank` is the first of its site. Sites count ranks by their number in the run. They may
    have fewer than `of` ranks.
    """
    ranks = rank.mesh.ranks if rank.within is None else rank.within.ranks
    here = tuple(r for r in ranks if r // of == rank.id // of)
    first = tuple({r // of: r for r in reversed(ranks)}[site] for site in dict.fromkeys(r // of for r in ranks))
    among = Group((f"site of {of}",), here, rank.mesh.generation, len(first))
    leaders = Group((f"leaders of sites of {of}",), first, rank.mesh.generation)
    whole: Rank = getattr(rank, "_whole", rank)
    return Member(whole, among), Member(whole, leaders) if rank.id == here[0] else None
