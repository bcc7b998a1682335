"""The mesh in which a strategy arranges the ranks that train."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from workbench.rank import Mesh, StrategyError

_MADE: WeakKeyDictionary[Any, dict[tuple[int, int], Mesh]] = WeakKeyDictionary()  # by strategy: (size, generation)


def mesh(strategy: Any, size: int, generation: int = 0) -> Mesh:
    """Of `size` ranks those that train, as `strategy` wants them. Raises StrategyError where its dimensions do not fit.

    One for all ranks of a process, as long as the strategy is there: with thousands of them each would hold thousands
    of numbers.
    """
    made = _MADE.setdefault(strategy, {})
    if (size, generation) not in made:
        ranks = tuple(r for r in range(size) if strategy.trains(r, size))
        made[size, generation] = Mesh(strategy.dims(len(ranks)), ranks, generation)
    return made[size, generation]


@lru_cache(maxsize=64)  # thousands of ranks ask for the same
def sharers(strategy: Any, size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks among whom `strategy` deals out what it shards; each group has all of it."""
    who = mesh(strategy, size)
    dims = strategy.shared_along or tuple(name for name, _ in who.dims)
    return tuple(dict.fromkeys(who.group(dims, rank).ranks for rank in who.ranks))


def refused(strategy: Any, size: int) -> str | None:
    """Why `strategy` cannot arrange `size` ranks, in a sentence that says what would do; or None."""
    try:
        mesh(strategy, size)
    except StrategyError as reason:
        return f"strategy={type(strategy).__name__}: {reason}"
    return None
