"""Finds a learning rate for each row by one rule: a grid on the first seed, one more rate, all seeds.

All rows are tuned alike. A grid of rates is tried on the first seed. If the best is at the grid's edge, the grid grows
by one rate there, once. The best rate then runs with every seed. This module knows neither the rows nor the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.bench.cells import SEEDS, Cell, Results

FACTOR = 2.0  # ratio of two neighbours of a grid


class Choice(NamedTuple):
    """The rate of a row. edge: whether it is still the largest or the smallest tried rate"""

    rate: float
    edge: bool
    tried: list[float]


def where(rate: float) -> str:
    """Returns the place of a cell that ran at so many times the task's rate."""
    return f"rate {rate:g}"


def last(f: dict[str, Any]) -> float:
    """Returns the final held-out loss; infinite if it is not a number."""
    loss = float(f["curve"][-1][2])
    return loss if math.isfinite(loss) else math.inf


def choice(found: Results, part: str, row: str, grid: Sequence[float]) -> Choice | None:
    """Returns the best rate of the grid and its extension on the first seed; None without measurements."""
    rates = [grid[0] / FACTOR, *grid, grid[-1] * FACTOR]
    ends = {r: last(at[SEEDS[0]]) for r in rates if SEEDS[0] in (at := found.seeds(part, row, where(r)))}
    if not ends:
        return None
    best = min(ends, key=lambda r: ends[r])
    return Choice(best, best in (min(ends), max(ends)), list(ends))


def at_edge(chosen: Choice, grid: Sequence[float]) -> str:
    """Returns a note on whether a rate is at the edge of the tried ones, and whether that was extended."""
    if not chosen.edge:
        return ""
    return (
        " (at the edge of the tried rates)"
        if widened(chosen, grid)
        else " (at the edge; the next rate is not tried yet)"
    )


def widened(chosen: Choice, grid: Sequence[float]) -> bool:
    """Whether the whole grid and a rate beyond it were tried."""
    return set(grid) < set(chosen.tried)


def cells(found: Results, part: str, row: str, grid: Sequence[float], make: Callable[[float, int], Cell]) -> list[Cell]:
    """Returns the next cells of a row as far as known: the grid, then its extension, then all seeds."""
    first = [make(rate, SEEDS[0]) for rate in grid]
    chosen = choice(found, part, row, grid)
    if chosen is None or not set(grid) <= set(chosen.tried):
        return first
    if len(chosen.tried) == len(grid) and chosen.edge:
        beyond = chosen.rate * FACTOR if chosen.rate == grid[-1] else chosen.rate / FACTOR
        return [*first, make(beyond, SEEDS[0])]
    wider = [make(rate, SEEDS[0]) for rate in chosen.tried if rate not in grid]
    return [*first, *wider, *(make(chosen.rate, seed) for seed in SEEDS[1:])]
