"""Texts that several pages of measurements share."""

from __future__ import annotations

import statistics

from tests.bench.cells import SEEDS


def missing(*what: str) -> str:
    return f"Not measured yet: {', '.join(what)}.\n"


def spread(values: list[float]) -> str:
    """Formats the mean and half the range; notes missing seeds."""
    if len(values) < len(SEEDS):
        return f"{statistics.fmean(values):.3f} ({len(values)} of {len(SEEDS)} seeds)"
    return f"{statistics.fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def low_high(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def kept(good: bool, asked: str) -> str:
    return f"(asked: {asked}{'' if good else ': NOT kept'})"
