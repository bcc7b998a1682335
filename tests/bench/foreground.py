"""The foreground forms of ShadowSync, for comparison: same tables, workers and formulas, but ranks wait.

Every `every` steps a trainer's step ends with one round of its shadow's work. These forms are not in the family: ranks
that meet for a change and a rank that waits in a round would wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies import ShadowSync, ShadowSyncBMUF, ShadowSyncMA
from workbench.strategies.embedding_tables._embeddings import Embeddings


class _Once:
    """A Rank in which a background makes one round."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._left = rank, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    async def again(self, *_: Any, **__: Any) -> int:
        self._left -= 1
        return self._rank.step + 1 if self._left == 0 else 0


@dataclass(frozen=True, kw_only=True)
class _Foreground(Embeddings):
    every: int = knob(10, 1, 1000, unit="steps", doc="steps between two rounds")

    async def background(self, rank: Rank, state: Any) -> None:
        if rank.role == "server":
            await self._serve(rank, state)

    async def step(self, rank: Rank, state: Any) -> None:
        await super().step(rank, state)
        if (rank.step + 1) % self.every == 0:
            shadow: Any = super(Embeddings, self)
            await shadow.background(_Once(self.peers(rank)), state)


@dataclass(frozen=True, kw_only=True)
class ForegroundMA(_Foreground, ShadowSyncMA):
    """Trainers average all parameters except the tables, and wait for it."""


@dataclass(frozen=True, kw_only=True)
class ForegroundBMUF(_Foreground, ShadowSyncBMUF):
    """Trainers filter their mean, and wait for it."""


@dataclass(frozen=True, kw_only=True)
class ForegroundEASGD(_Foreground, ShadowSync):
    """Each trainer meets the servers' centre, and waits for it."""
