"""One rank of a run, as changes and policies see it."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.experiment import Experiment
from workbench.host.core.planned import Planned
from workbench.host.core.views import RankView


class TryingView(RankView, Protocol):
    """A rank that tries whether its model can be trained otherwise."""

    def make_example(self, wanted: Experiment) -> Any:
        """Returns a batch that is equal on all ranks and not taken from the training data's order."""


class PolicyView(RankView, Protocol):
    """A rank that asks a policy.

    planned: future changes, in the order of their steps
    obeyed:  the number of changes made or refused so far
    """

    planned: list[Planned]

    @property
    def obeyed(self) -> int: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this host cannot train it."""

    async def execute_change(self, change: Planned) -> bool:
        """Makes or refuses one change. Returns whether a change was made."""

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        """Returns the text of rank `by`, on every rank."""
