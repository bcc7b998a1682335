"""The graphs of gossip: which ranks exchange in a round, and their mixing weights.

A graph is one of GRAPHS or a user's own, as the text that _edges.py parses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

from workbench.settings import KnobError
from workbench.strategies._edges import both_ways, one_way

PAIRINGS = ("butterfly", "shift_one")  # each rank with one other rank in each round
GRAPHS = ("ring", "chain", "complete", "torus", "hypercube", "exponential", *PAIRINGS)
PUSHES = ("exponential", "ring", "chain", "complete")


class Round(NamedTuple):
    """One rank's part in one round: the ranks it sends to, and its weight for each rank's value."""

    to: tuple[int, ...]  # upwards from this rank, so that on regular graphs no two ranks send to the same port at once
    shares: dict[int, float]  # by source in rising order, with its own; they add up to 1


class Push(NamedTuple):
    """One rank's part in one round of push-sum: its kept and given shares add up to 1."""

    keeps: float
    gives: dict[int, float]  # by receiver, upwards from this rank
    sources: tuple[int, ...]  # ranks that give to it, in rising order


def neighbours(graph: str, size: int, index: int) -> set[int]:
    """Returns the ranks that `index` exchanges with, on named graphs that are the same in every round."""
    if graph == "ring":
        return {(index - 1) % size, (index + 1) % size} - {index}
    if graph == "chain":
        return {other for other in (index - 1, index + 1) if 0 <= other < size}
    if graph == "torus":
        width = size // rows(size)
        row, column = divmod(index, width)
        beside = {row * width + (column + d) % width for d in (-1, 1)}
        return (beside | {(index + d * width) % size for d in (-1, 1)}) - {index}
    around = range(size) if graph == "complete" else (index ^ (1 << k) for k in range(bits(size)))
    return {other % size for other in around} - {index}


def partner(graph: str, size: int, index: int, number: int) -> int:
    """Returns the partner of rank `index` in round `number`.

    "butterfly": the rank whose number differs in one bit, the lowest first. "shift_one" (Bagua's): each rank of the
    lower half has one of the upper half, shifted by one in each round.
    """
    if graph == "butterfly":
        return index ^ (1 << (number % bits(size)))
    half = size // 2
    return (number + index) % half + half if index < half else (index - half - number) % half


def mixing_round(graph: str, mix: float, size: int, index: int, number: int) -> Round:
    """Returns round `number` of rank `index` with Metropolis weights.

    A neighbour's weight is `mix` / (1 + the larger degree of the two); `mix` < 1 goes only that part of the way. The
    rows and columns of the matrix of all ranks' shares add up to 1. The matrix is symmetric except for "exponential"
    and a matrix of the user's own.
    """
    if size == 1:
        return Round((), {0: 1.0})
    if graph == "exponential":
        away = 1 << (number % bits(size))
        source = (index - away) % size
        return Round(((index + away) % size,), _sorted({index: 1 - mix / 2, source: mix / 2}))
    if graph in PAIRINGS:
        other = partner(graph, size, index, number)
        return Round((other,), _sorted({index: 1 - mix / 2, other: mix / 2}))
    if graph not in GRAPHS:
        w = both_ways(graph, size)
        shares = {r: mix * w[index][r] for r in range(size) if w[index][r] and r != index}
        to = {r for r in range(size) if w[r][index] and r != index}
    else:
        near = neighbours(graph, size, index)
        degree = {r: len(neighbours(graph, size, r)) for r in near | {index}}
        shares = {r: mix / (1 + max(degree[index], degree[r])) for r in near}
        to = near
    shares[index] = 1.0 - sum(shares.values())
    return Round(_upwards(to, size, index), _sorted(shares))


def push_round(graph: str, size: int, index: int, number: int) -> Push:
    """Returns round `number` of rank `index` in push-sum: a rank keeps as much as it gives to each receiver.

    The columns of the matrix of all ranks' shares add up to 1. Its rows do not on "chain" and many user graphs.
    """
    if size == 1:
        return Push(1.0, {}, ())
    if graph not in GRAPHS:
        w = one_way(graph, size)
        to = {r for r in range(size) if w[r][index] and r != index}
        gives = {r: w[r][index] for r in _upwards(to, size, index)}
        return Push(w[index][index], gives, tuple(r for r in range(size) if w[index][r] and r != index))
    if graph in ("exponential", "ring"):
        away = 1 << (number % bits(size)) if graph == "exponential" else 1
        return Push(0.5, {(index + away) % size: 0.5}, ((index - away) % size,))
    near = sorted(neighbours(graph, size, index))
    share = 1 / (1 + len(near))
    return Push(share, dict.fromkeys(_upwards(near, size, index), share), tuple(near))


def hops(graph: str, size: int) -> int:
    """Returns the rounds until a report of rank 0 has reached every rank, passed from neighbour to neighbour."""
    if size == 1:
        return 1
    if graph == "torus":
        return rows(size) // 2 + size // rows(size) // 2
    if graph not in GRAPHS or graph == "shift_one":
        return _carried(graph, size, 0, push=False)
    return {"ring": size // 2, "chain": size - 1, "complete": 1}.get(graph, bits(size))


def push_hops(graph: str, size: int, late: int) -> int:
    """Returns the same for push-sum, if a message may be received `late` rounds after it was sent."""
    if graph in ("chain", "complete", "ring") or size == 1:
        return ({"complete": 1}.get(graph, size - 1) or 1) * (late + 1)
    return _carried(graph, size, late, push=True)


def refused(graph: str, size: int) -> str | None:
    """Returns why `graph` cannot connect `size` ranks, with an alternative, or None."""
    if graph in ("hypercube", "butterfly") and size & (size - 1):
        least = 1 << (bits(size) - 1)
        return f"a {graph} needs a power of two, not {size} ranks; use {least} ranks or graph='ring'"
    if graph == "torus" and size > 1 and rows(size) == 1:
        return (
            f"a torus needs a number of ranks that makes a rectangle, and {size} does not; use {size + 1} ranks "
            f"or graph='ring'"
        )
    if graph == "shift_one" and size > 1 and size % 2:
        return (f"graph='shift_one' pairs all ranks, so it needs an even number, not {size}; use {size - 1} or "
        f"{size + 1} ranks, or graph='exponential'")  # fmt: skip
    return None if graph in GRAPHS else _refused(both_ways, graph, size)


def push_refused(graph: str, size: int) -> str | None:
    """Returns the same for push-sum."""
    return None if graph in GRAPHS else _refused(one_way, graph, size)


def bits(size: int) -> int:
    """Returns the rounds of doubling until `size` ranks are reached."""
    return max(1, (size - 1).bit_length())


def rows(size: int) -> int:
    """Returns the shorter side of the squarest rectangle of `size` ranks."""
    return max(k for k in range(1, isqrt(size) + 1) if size % k == 0)


@lru_cache(maxsize=256)
def _carried(graph: str, size: int, late: int, push: bool) -> int:
    """Returns the rounds until a report of rank 0 has reached every rank, from the worst round to begin in."""
    longest = 0
    for first in range(bits(size) if graph == "exponential" else 1):  # "shift_one" is the same from any round
        tells = {0: first}  # by rank, the first round in which it forwards the report
        number = first
        while len(tells) < size:
            for r in [r for r, begins in tells.items() if begins <= number]:
                to = push_round(graph, size, r, number).gives if push else mixing_round(graph, 1.0, size, r, number).to
                for other in to:
                    tells.setdefault(other, number + 1 + late)
            number += 1
        longest = max(longest, max(tells.values()) - first)
    return longest


def _refused(read: Callable[[str, int], object], text: str, size: int) -> str | None:
    try:
        read(text, size)
    except KnobError as reason:
        return str(reason)
    return None


def _upwards(to: Iterable[int], size: int, index: int) -> tuple[int, ...]:
    return tuple(sorted(to, key=lambda r: (r - index) % size))


def _sorted(shares: dict[int, float]) -> dict[int, float]:
    return dict(sorted(shares.items()))
