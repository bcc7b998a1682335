"""One rank of a run, as its memory account sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from workbench.host.core.views import RankView


class KeptWeights(Protocol):
    """Copies of weights."""

    @property
    def kept(self) -> list[Tensor]: ...


class InFlightView(Protocol):
    """Micro-batches in flight. stashed: what they keep besides their activations"""

    @property
    def stashed(self) -> Iterable[Tensor]: ...
    @property
    def versions(self) -> KeptWeights: ...


class ShardedView(Protocol):
    """Whether parameters are in shards now."""

    @property
    def sharded(self) -> bool: ...


class AccountView(RankView, Protocol):
    """A rank whose bytes are counted."""

    @property
    def flow(self) -> InFlightView: ...
    @property
    def reading(self) -> ShardedView: ...
