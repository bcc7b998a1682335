"""A rank's view for sharded passes."""

from __future__ import annotations

from typing import Protocol

from workbench.host.core.rank_view import RankView
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.sharding.access_trace import AccessTrace


class ReadView(RankView, Protocol):
    """A rank with parameters in shards."""

    @property
    def memory_account(self) -> MemoryAccount: ...

    def foresee_reads(self, cheaply: bool) -> AccessTrace | None:
        """Returns a step's reads; None if unknown. cheaply: does not build the model"""
