"""One rank of a run, as those see it who measure and watch it."""

from __future__ import annotations

from typing import Protocol

from workbench.host.core.views import RankView
from workbench.host.memory.views import ShardedView


class WantedNames(Protocol):
    """What a policy asks for. names: the Samples that it reads"""

    @property
    def names(self) -> tuple[str, ...]: ...


class MeasuringView(RankView, Protocol):
    """A rank that measures its compression. flushing: uncompressed steps left"""

    @property
    def flushing(self) -> int: ...
    @property
    def steering(self) -> WantedNames: ...


class WatchedView(RankView, Protocol):
    """A rank whose losses and gradients are watched."""

    @property
    def reading(self) -> ShardedView: ...
