"""One rank of a run, as passes over its shards see it."""

from __future__ import annotations

from typing import Protocol

from workbench.host.core.views import RankView
from workbench.host.memory.ledger import Ledger
from workbench.host.sharding.trial import Trial


class ReadView(RankView, Protocol):
    """A rank whose passes read parameters that may be in shards."""

    @property
    def ledger(self) -> Ledger: ...

    def foreseen(self, cheaply: bool) -> Trial | None:
        """Returns what a step will read; None if that is unknown. cheaply: the model is not built for it"""
