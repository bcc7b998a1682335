"""A rank's view for changes and policies."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.experiment import Experiment
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.core.planned_event import Planned
from workbench.host.core.rank_view import RankView


class TryingView(RankView, Protocol):
    """A rank in a trial."""

    def make_example(self, wanted: Experiment) -> Any:
        """Returns a batch, equal on all ranks and not from training's order."""


class PolicyView(RankView, Protocol):
    """A rank that asks a policy. queue: its planned changes, and the number made so far"""

    @property
    def queue(self) -> ChangeQueue: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this host cannot train it."""

    async def execute_change(self, change: Planned) -> bool:
        """Returns whether it was made."""

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        """Returns rank `by`'s text."""
