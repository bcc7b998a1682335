"""Texts that several pages of measurements share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tests.bench.cells import SEEDS


class Goal(NamedTuple):
    """A share that must not exceed a limit."""

    what: str
    value: float
    most: float

    @property
    def kept(self) -> bool:
        return self.value <= self.most

    def __str__(self) -> str:
        verdict = "kept" if self.kept else "NOT kept"
        return f"{self.what} {100 * self.value:.1f} % (goal: at most {100 * self.most:.0f} %: {verdict})"


def missing(*what: str) -> str:
    return f"Not measured yet: {', '.join(what)}.\n"


def spread(values: list[float]) -> str:
    """Formats the mean and half the range; notes missing seeds."""
    if len(values) < len(SEEDS):
        return f"{statistics.fmean(values):.3f} ({len(values)} of {len(SEEDS)} seeds)"
    return f"{statistics.fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def low_high(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def listed(parts: Sequence[object], last: str = "and") -> str:
    """Formats a list in words: "a, b and c"."""
    *first, end = map(str, parts)
    return f"{', '.join(first)} {last} {end}" if first else end


def kept(good: bool, asked: str) -> str:
    return f"(goal: {asked}{'' if good else ': NOT kept'})"
