"""The mesh in which a strategy arranges the ranks that train."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from workbench.rank import Mesh, StrategyError


@lru_cache(maxsize=64)
def mesh(strategy: Any, size: int, generation: int = 0) -> Mesh:
    """Of `size` ranks those that train, as `strategy` wants them. Raises StrategyError where its dimensions do not fit.

    One for all ranks of a process: with thousands of them each would hold thousands of numbers.
    """
    ranks = tuple(r for r in range(size) if strategy.trains(r, size))
    return Mesh(strategy.dims(len(ranks)), ranks, generation)


def refused(strategy: Any, size: int) -> str | None:
    """Why `strategy` cannot arrange `size` ranks, in a sentence that says what would do; or None."""
    try:
        mesh(strategy, size)
    except StrategyError as reason:
        return f"strategy={type(strategy).__name__}: {reason}"
    return None
