"""How optimizer state or parameters are sharded."""

from __future__ import annotations

from typing import NamedTuple

from workbench.rank import Part


class ShardLayout(NamedTuple):
    """How state is cut.

    buckets: by bucket, the places of its parameters
    groups:  groups of ranks, in order; each group shards all buckets over its ranks
    """

    buckets: tuple[tuple[Part, ...], ...]
    groups: tuple[tuple[int, ...], ...]
