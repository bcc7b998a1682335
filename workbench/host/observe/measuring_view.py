"""A rank's view for measurements."""

from __future__ import annotations

from typing import Protocol

from workbench.host.core.rank_view import RankView
from workbench.host.memory.account_view import ShardedView


class WantedNames(Protocol):
    """A policy's Samples."""

    @property
    def names(self) -> tuple[str, ...]: ...


class MeasuringView(RankView, Protocol):
    """A measured rank. flushing: uncompressed steps left"""

    @property
    def flushing(self) -> int: ...
    @property
    def policy_runner(self) -> WantedNames: ...


class WatchedView(RankView, Protocol):
    """A watched rank."""

    @property
    def unsharder(self) -> ShardedView: ...
