"""Helpers of algorithms with two levels: ranks by site, and valid algorithms between sites."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.fabric.algorithms._base import Algorithm
from workbench.fabric.algorithms.by_group import ByGroup


def group_by_site(size: int, ranks: Sequence[int]) -> list[list[int]]:
    """Splits `ranks` (ascending) into sites of `size` neighbours. The last may be smaller.

    >>> group_by_site(4, range(6))
    [[0, 1, 2, 3], [4, 5]]
    """
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // size, []).append(rank)
    return list(found.values())


def refuse_between(name: str, between: Algorithm) -> str | None:
    """Returns why algorithm `name` cannot use `between` between sites, with a remedy; or None."""
    if between.native:
        return f"{name}.between=Native(): the backend's algorithm has no messages; take Ring()"
    if isinstance(between, ByGroup):
        return f"{name}.between=ByGroup(): ranks of different sites are not a group of the mesh; take Ring()"
    return between.refuses()
