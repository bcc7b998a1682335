"""A rank's view for its memory account."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from workbench.host.core.rank_view import RankView


class KeptWeights(Protocol):
    """Copies of weights."""

    @property
    def kept(self) -> list[Tensor]: ...


class InFlightView(Protocol):
    """Micro-batches in flight. stashed: their tensors without activations"""

    @property
    def stashed(self) -> Iterable[Tensor]: ...
    @property
    def versions(self) -> KeptWeights: ...


class ShardedView(Protocol):
    """Whether parameters are sharded."""

    @property
    def sharded(self) -> bool: ...


class AccountView(RankView, Protocol):
    """A rank with counted bytes."""

    @property
    def micros_in_flight(self) -> InFlightView: ...
    @property
    def unsharder(self) -> ShardedView: ...
