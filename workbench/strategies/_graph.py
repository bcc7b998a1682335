"""Who talks to whom: the graphs that gossip runs on, and the weights with which neighbours are mixed."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

GRAPHS = ("ring", "chain", "complete", "torus", "hypercube", "exponential")


class Round(NamedTuple):
    """What one rank does in one round: whom it sends to, and with which share it takes each rank's value in."""

    to: tuple[int, ...]
    shares: dict[int, float]  # by source in rising order, its own among them; they add up to 1


def neighbours(graph: str, size: int, index: int) -> set[int]:
    """The ranks that `index` exchanges with, in every graph but "exponential"."""
    around = {"ring": {index - 1, index + 1}, "complete": set(range(size)),
              "hypercube": {index ^ (1 << k) for k in range(bits(size))}}  # fmt: skip
    if graph == "chain":
        return {other for other in (index - 1, index + 1) if 0 <= other < size}
    if graph == "torus":
        width = size // rows(size)
        row, column = divmod(index, width)
        beside = {row * width + (column + d) % width for d in (-1, 1)}
        return (beside | {(index + d * width) % size for d in (-1, 1)}) - {index}
    return {other % size for other in around[graph]} - {index}


def mixing_round(graph: str, mix: float, size: int, index: int, number: int) -> Round:
    """Round `number` of rank `index`, with Metropolis weights: 1 / (1 + the larger degree of the two) per neighbour.

    `mix` < 1 goes only that part of the way. The matrix of all ranks' shares is symmetric but for "exponential", and
    its rows and columns add up to 1.
    """
    if size == 1:
        return Round((), {0: 1.0})
    if graph == "exponential":
        away = 1 << (number % bits(size))
        source = (index - away) % size
        return Round(((index + away) % size,), _sorted({index: 1 - mix / 2, source: mix / 2}))
    near = neighbours(graph, size, index)
    degree = {r: len(neighbours(graph, size, r)) for r in near | {index}}
    shares = {r: mix / (1 + max(degree[index], degree[r])) for r in near}
    shares[index] = 1.0 - sum(shares.values())
    return Round(tuple(sorted(near)), _sorted(shares))


def hops(graph: str, size: int) -> int:
    """Rounds until what rank 0 says has reached every rank, carried from neighbour to neighbour."""
    if size == 1:
        return 1
    if graph == "torus":
        return rows(size) // 2 + size // rows(size) // 2
    return {"ring": size // 2, "chain": size - 1, "complete": 1}.get(graph, bits(size))


def refused(graph: str, size: int) -> str | None:
    """Why `graph` cannot be drawn on `size` ranks, in a sentence that says what would do; or None."""
    if graph == "hypercube" and size & (size - 1):
        return f"a hypercube needs a power of two, not {size} ranks; use {1 << (bits(size) - 1)} ranks or graph='ring'"
    if graph == "torus" and size > 1 and rows(size) == 1:
        return f"{size} ranks make no rectangle, which a torus needs; use {size + 1} ranks or graph='ring'"
    return None


def bits(size: int) -> int:
    """The rounds of doubling until `size` ranks are reached."""
    return max(1, (size - 1).bit_length())


def rows(size: int) -> int:
    """The shorter side of the squarest rectangle of `size` ranks."""
    return max(k for k in range(1, isqrt(size) + 1) if size % k == 0)


def _sorted(shares: dict[int, float]) -> dict[int, float]:
    return dict(sorted(shares.items()))
