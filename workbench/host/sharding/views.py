"""One rank of a run, as passes over its shards see it."""

from __future__ import annotations

from typing import Protocol

from workbench.host.core.views import RankView
from workbench.host.memory.account import MemoryAccount
from workbench.host.sharding.access_trace import AccessTrace


class ReadView(RankView, Protocol):
    """A rank whose passes read parameters that may be in shards."""

    @property
    def ledger(self) -> MemoryAccount: ...

    def foresee_reads(self, cheaply: bool) -> AccessTrace | None:
        """Returns what a step will read; None if that is unknown. cheaply: the model is not built for it"""
