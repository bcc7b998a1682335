"""A learning rate for each row by one rule: the same few rates on the first seed, one more beyond an edge, all seeds.

What is tuned is tuned alike: a grid of rates is tried on the first seed; where the best lies at the grid's edge, the
grid grows by one rate there, once; the best rate is then run with every seed. Knows neither the rows nor the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.bench.cells import SEEDS, Cell, Results

FACTOR = 2.0  # between two neighbours of a grid


class Choice(NamedTuple):
    """The rate of a row. edge: is it still the largest or the smallest of those that were tried?"""

    rate: float
    edge: bool
    tried: list[float]


def where(rate: float) -> str:
    """The place of a cell that ran at so many times the task's rate."""
    return f"rate {rate:g}"


def last(f: dict[str, Any]) -> float:
    """The held-out loss at the end; infinite where it is not a number."""
    loss = float(f["curve"][-1][2])
    return loss if math.isfinite(loss) else math.inf


def choice(found: Results, part: str, row: str, grid: Sequence[float]) -> Choice | None:
    """The best rate on the first seed, of the grid and what widened it; None where nothing was measured."""
    rates = [grid[0] / FACTOR, *grid, grid[-1] * FACTOR]
    ends = {r: last(at[SEEDS[0]]) for r in rates if SEEDS[0] in (at := found.seeds(part, row, where(r)))}
    if not ends:
        return None
    best = min(ends, key=lambda r: ends[r])
    return Choice(best, best in (min(ends), max(ends)), list(ends))


def at_edge(chosen: Choice, grid: Sequence[float]) -> str:
    """In words, after a rate: is it at the edge of what was tried, and was that widened already?"""
    if not chosen.edge:
        return ""
    return " (the edge of what was tried)" if widened(chosen, grid) else " (the edge; the next is not tried yet)"


def widened(chosen: Choice, grid: Sequence[float]) -> bool:
    """Was all of the grid tried, and a rate beyond it?"""
    return set(grid) < set(chosen.tried)


def cells(found: Results, part: str, row: str, grid: Sequence[float], make: Callable[[float, int], Cell]) -> list[Cell]:
    """What a row needs as far as can be told from what was found: the grid, then what lies beyond, then all seeds."""
    first = [make(rate, SEEDS[0]) for rate in grid]
    chosen = choice(found, part, row, grid)
    if chosen is None or not set(grid) <= set(chosen.tried):
        return first
    if len(chosen.tried) == len(grid) and chosen.edge:
        beyond = chosen.rate * FACTOR if chosen.rate == grid[-1] else chosen.rate / FACTOR
        return [*first, make(beyond, SEEDS[0])]
    wider = [make(rate, SEEDS[0]) for rate in chosen.tried if rate not in grid]
    return [*first, *wider, *(make(chosen.rate, seed) for seed in SEEDS[1:])]
