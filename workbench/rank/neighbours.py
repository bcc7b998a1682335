"""Sites: a rank among its neighbours, and among the first of all neighbourhoods, where no mesh says so."""

from __future__ import annotations

from workbench.rank.mesh import Group
from workbench.rank.ops import Member, Rank


def sites(rank: Rank, of: int) -> tuple[Rank, Rank | None]:
    """`rank` among the neighbours of its site, of so many each, and among the first of each site if it is one.

    Sites are of ranks as the run counts them, and need be no dimension of the mesh; each may be smaller than that.
    """
    ranks = rank.mesh.ranks if rank.within is None else rank.within.ranks
    here = tuple(r for r in ranks if r // of == rank.id // of)
    first = tuple({r // of: r for r in reversed(ranks)}[site] for site in dict.fromkeys(r // of for r in ranks))
    among = Group((f"site of {of}",), here, rank.mesh.generation, len(first))
    leaders = Group((f"leaders of sites of {of}",), first, rank.mesh.generation)
    whole: Rank = getattr(rank, "_whole", rank)
    return Member(whole, among), Member(whole, leaders) if rank.id == here[0] else None
