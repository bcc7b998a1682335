"""Writes ranks, and the verbs that follow them, into texts."""

from __future__ import annotations

from collections.abc import Collection


def format_ranks(ranks: Collection[int], most: int | None = None) -> str:
    """Returns `rank 2`, `ranks 0, 1, 3` or, with `most`, `ranks 0, 1 and 6 more`.

    >>> format_ranks([2]), format_ranks([0, 1, 3]), format_ranks([0, 1, 3, 4], most=2)
    ('rank 2', 'ranks 0, 1, 3', 'ranks 0, 1 and 2 more')
    """
    if not ranks:
        return "no rank"
    listed = list(ranks)[:most]
    more = f" and {len(ranks) - len(listed)} more" if len(ranks) > len(listed) else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, listed))}{more}"


def conjugate_be(ranks: Collection[int]) -> str:
    """Returns `is` or `are`."""
    return "are" if len(ranks) > 1 else "is"


def conjugate_have(ranks: Collection[int]) -> str:
    """Returns `has` or `have`."""
    return "have" if len(ranks) > 1 else "has"


def conjugate_wait(ranks: Collection[int]) -> str:
    """Returns `waits` or `wait`."""
    return "wait" if len(ranks) > 1 else "waits"
