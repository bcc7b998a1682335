"""Copies of the parameters that a strategy keeps, such as an anchor or a centre."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.rank import Bucket, Memory


def copies(params: Sequence[Bucket], *names: str) -> Memory:
    """Returns a Memory that holds a copy of `params` in each slot of `names`."""
    memory = Memory()
    keep(memory, params, *names)
    return memory


def keep(memory: Memory, params: Sequence[Bucket], *names: str) -> None:
    """Copies `params` into each slot of `names`."""
    for bucket in params:
        for name in names:
            memory.flat(name, bucket).copy_(bucket.data)
