"""Every rank holds and computes the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.partitions._base import Partition


@dataclass(frozen=True, kw_only=True)
class Whole(Partition):
    """Every rank is a replica: it holds the whole model and computes all of it.

    When to use it: while the model fits into a rank's memory, or under a strategy that shards it (ZeRO3).
    """
