"""Writes numbers as text."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Formats seconds with three digits, in ms below a second.

    >>> duration(0.01234), duration(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
