"""Writes numbers as text."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Formats seconds with three digits, in ms below a second.

    >>> format_seconds(0.01234), format_seconds(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
