"""Parses a user's own graph from text: edges ("0-1 1-2 2-0") or weights ("0.5 0.5; 0.5 0.5")."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import torch

from workbench.settings import KnobError

SUM_TOLERANCE = 1e-6  # tolerance for the sum of a row or a column
EXAMPLE_EDGES = "'0-1 1-2 2-0', or p rows of p weights such as '1/2 1/2; 1/2 1/2'"

_PAIR = re.compile(r"(\d+)\s*([->])\s*(\d+)")


class Drawn(NamedTuple):
    """A parsed graph: its arrows, and the weights if the text has them."""

    arrows: frozenset[tuple[int, int]]  # (from, to), without loops
    rows: tuple[tuple[float, ...], ...] | None  # rows[i][j]: the share of j's value that i takes


@lru_cache(maxsize=64)
def drawn(text: str, size: int) -> Drawn:
    """Parses `text` for `size` ranks. Raises KnobError with an example of an allowed text."""
    pairs = _PAIR.findall(text)
    if pairs and not _PAIR.sub("", text).strip(" ,;\n"):
        arrows = {(int(a), int(b)) for a, _, b in pairs} | {(int(b), int(a)) for a, how, b in pairs if how == "-"}
        found = Drawn(frozenset(arrows), None)
    else:
        rows = _rows(text, size)
        taken = ((j, i) for i, row in enumerate(rows) for j, share in enumerate(row) if share)
        found = Drawn(frozenset((j, i) for j, i in taken if i != j), rows)
    if strangers := sorted({r for arrow in found.arrows for r in arrow if r >= size}):
        raise _wrong(text, f"there is no rank {strangers[0]}; there are ranks 0 to {size - 1}")
    if loops := [a for a, b in sorted(found.arrows) if a == b]:
        raise _wrong(text, f"{loops[0]}-{loops[0]} joins a rank to itself; an edge joins two ranks, such as 0-1")
    if (far := _unreached(found.arrows, size)) is not None:
        raise _wrong(
            text,
            f"not connected: no path leads from rank {far[0]} to rank {far[1]}; add an edge such as {far[0]}-{far[1]}",
        )
    return found


@lru_cache(maxsize=64)
def both_ways(text: str, size: int) -> tuple[tuple[float, ...], ...]:
    """Returns the doubly stochastic matrix of `text`; edges get Metropolis weights. Raises KnobError."""
    graph = drawn(text, size)
    if graph.rows is None:
        if alone := [(a, b) for a, b in sorted(graph.arrows) if (b, a) not in graph.arrows]:
            a, b = alone[0]
            raise _wrong(text, f"{a}>{b} goes one way only; write {a}-{b}, or use StochasticGradientPush")
        degree = [sum(a == r for a, _ in graph.arrows) for r in range(size)]
        weights = {(a, b): 1 / (1 + max(degree[a], degree[b])) for a, b in graph.arrows}
        return _filled(weights, [1 - sum(w for (_, to), w in sorted(weights.items()) if to == r) for r in range(size)])
    sums = [("row", i, sum(row)) for i, row in enumerate(graph.rows)]
    sums += [("column", j, sum(column)) for j, column in enumerate(zip(*graph.rows, strict=True))]
    _add_up(text, sums, "every row and every column of a mixing matrix must add up to 1")
    if size > 1 and _second(graph.rows) > 1 - 1e-9:
        raise _wrong(
            text,
            "ranks would swap their values forever and never agree; give each rank a weight above 0 on the diagonal",
        )
    return graph.rows


@lru_cache(maxsize=64)
def one_way(text: str, size: int) -> tuple[tuple[float, ...], ...]:
    """Returns the column-stochastic matrix of `text`; each sender shares equally over its edges. Raises KnobError."""
    graph = drawn(text, size)
    if graph.rows is None:
        share = [1 / (1 + sum(a == r for a, _ in graph.arrows)) for r in range(size)]
        return _filled({(a, b): share[a] for a, b in graph.arrows}, share)
    sums = [("column", j, sum(column)) for j, column in enumerate(zip(*graph.rows, strict=True))]
    _add_up(text, sums, "every column must add up to 1, so that the sum over ranks stays the same")
    if bare := [r for r, row in enumerate(graph.rows) if not row[r]]:
        raise _wrong(text, f"rank {bare[0]} keeps no share of its value; give it a weight above 0 on the diagonal")
    return graph.rows


def _rows(text: str, size: int) -> tuple[tuple[float, ...], ...]:
    lines = [line.replace(",", " ").split() for line in re.split(r"[;\n]", text) if line.strip()]
    try:
        rows = tuple(tuple(float(Fraction(word)) for word in line) for line in lines)
    except (ValueError, ZeroDivisionError):
        raise _wrong(text, f"must be edges such as {EXAMPLE_EDGES}") from None
    if [len(row) for row in rows] != [size] * size:
        raise _wrong(
            text,
            f"{len(rows)} rows of {'/'.join(map(str, sorted({len(r) for r in rows})))} weights; "
            f"{size} ranks need {size} rows of {size} weights, or edges such as '0-1 1-2 2-0'",
        )
    for i, row in enumerate(rows):
        if min(row) < 0:
            raise _wrong(text, f"row {i} has the weight {min(row):g}; weights must be 0 or more")
    return rows


def _add_up(text: str, sums: list[tuple[str, int, float]], rule: str) -> None:
    off = [f"{what} {number} adds up to {total:.6g}" for what, number, total in sums if abs(total - 1) > SUM_TOLERANCE]
    if off:
        raise _wrong(text, f"{', '.join(off)}; {rule}")


def _filled(weights: dict[tuple[int, int], float], own: list[float]) -> tuple[tuple[float, ...], ...]:
    """Returns the matrix with these weights by `(from, to)`, and `own` on its diagonal."""
    ranks = range(len(own))
    return tuple(tuple(own[i] if i == j else weights.get((j, i), 0.0) for j in ranks) for i in ranks)


def _second(rows: tuple[tuple[float, ...], ...]) -> float:
    """Returns the second largest |eigenvalue| of a doubly stochastic matrix."""
    w = torch.tensor(rows, dtype=torch.float64)
    return float(torch.linalg.eigvals(w - 1 / len(rows)).abs().max())


def _unreached(arrows: frozenset[tuple[int, int]], size: int) -> tuple[int, int] | None:
    """Returns two ranks if the first cannot reach the second; None if all ranks reach all."""
    for flipped in (False, True):
        reached, new = {0}, {0}
        while new:
            new = {b for a, b in ((y, x) if flipped else (x, y) for x, y in arrows) if a in new} - reached
            reached |= new
        if left := sorted(set(range(size)) - reached):
            return (left[0], 0) if flipped else (0, left[0])
    return None


def _wrong(text: str, why: str) -> KnobError:
    return KnobError(f"edges={text!r}: {why}")
