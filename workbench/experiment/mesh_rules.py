"""The mesh of a strategy's training ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from workbench.fabric import Algorithm
from workbench.partitions import Partition, Whole
from workbench.rank import Mesh, StrategyError
from workbench.settings import short

WHOLE = Whole()
# strategy -> (size, generation, the partition's dimensions) -> mesh
_MADE: WeakKeyDictionary[Any, dict[tuple[Any, ...], Mesh]] = WeakKeyDictionary()


def make_mesh(strategy: Any, size: int, generation: int = 0, partition: Partition = WHOLE) -> Mesh:
    """Returns the mesh of the training ranks: the strategy's dimensions, then the partition's.

    A process's ranks share it because copies for thousands of ranks take much memory. Raises StrategyError if the
    dimensions do not fit.
    """
    made = _MADE.setdefault(strategy, {})
    inside = partition.dims()
    if (size, generation, inside) not in made:
        ranks = tuple(r for r in range(size) if strategy.trains(r, size))
        dims = (*_dims(strategy, len(ranks) // partition.size), *inside)
        made[size, generation, inside] = Mesh(dims, ranks, generation, tuple(name for name, _ in inside))
    return made[size, generation, inside]


def _dims(strategy: Any, size: int) -> tuple[tuple[str, int], ...]:
    """Returns the strategy's dimensions for `size` replicas. Raises StrategyError unless each is (name, number)."""
    said = strategy.dims(size)
    try:
        dims = tuple((name, n) for name, n in said)
    except (TypeError, ValueError):
        dims = ()
    if not dims or not all(isinstance(name, str) and name and type(n) is int and n > 0 for name, n in dims):
        raise StrategyError(
            f"dims={short(said)}: must be pairs of a name and a number of ranks, neighbours last, such as "
            f"(('between', {size}), ('within', 1))"
        )
    return dims


@lru_cache(maxsize=64)  # thousands of ranks need the same result
def list_shard_groups(strategy: Any, size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of ranks in which `strategy` shards. Each group holds all shards."""
    who = make_mesh(strategy, size)
    dims = strategy.shared_along or tuple(name for name, _ in who.dims)
    found: dict[int, tuple[int, ...]] = {}
    for rank in who.ranks:
        if rank not in found:
            ranks = who.group(dims, rank).ranks
            found.update(dict.fromkeys(ranks, ranks))
    return tuple(dict.fromkeys(found.values()))


def explain_refusal(strategy: Any, size: int, partition: Partition = WHOLE) -> str | None:
    """Returns why `strategy` cannot arrange `size` ranks, with a remedy; or None."""
    said = f"strategy={type(strategy).__name__}"
    try:
        names = [name for name, _ in make_mesh(strategy, size, partition=partition).dims]
    except StrategyError as reason:
        return f"{said}: {reason}"
    if unknown := [name for name in strategy.shared_along if name not in names]:
        return (
            f"{said}: shared_along has {unknown[0]!r}, and the dimensions of its mesh are {', '.join(names)}; use "
            f"some of these"
        )
    return None


def explain_algorithm_refusal(algorithm: Algorithm, strategy: Any) -> str | None:
    """Returns why `strategy` cannot use this all-reduce `algorithm`, with a remedy; or None."""
    if strategy.opaque and not algorithm.native:
        return (
            f"fabric.algorithm={type(algorithm).__name__}: under {type(strategy).__name__} torch itself sums, by the "
            f"backend's algorithm; take Native(), or strategy=DDP()"
        )
    return algorithm.refuses()
