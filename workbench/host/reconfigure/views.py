"""A rank's view for changes and policies."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.experiment import Experiment
from workbench.host.core.planned import Planned
from workbench.host.core.views import RankView


class TryingView(RankView, Protocol):
    """A rank in a trial."""

    def make_example(self, wanted: Experiment) -> Any:
        """Returns a batch, equal on all ranks and not from training's order."""


class PolicyView(RankView, Protocol):
    """A rank that asks a policy.

    planned, obeyed: as in RankLoop and ElasticMember
    """

    planned: list[Planned]

    @property
    def obeyed(self) -> int: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Raises KnobError if not."""

    async def execute_change(self, change: Planned) -> bool:
        """Returns whether it was made."""

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        """Returns rank `by`'s text."""
