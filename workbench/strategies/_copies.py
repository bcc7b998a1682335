"""Copies of the parameters that a strategy keeps: an anchor, a centre, what neighbours know."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.rank import Bucket, Memory


def copies(params: Sequence[Bucket], *names: str) -> Memory:
    """A Memory that holds a copy of `params` in each of `names`: where all ranks are equal, everybody's."""
    memory = Memory()
    keep(memory, params, *names)
    return memory


def keep(memory: Memory, params: Sequence[Bucket], *names: str) -> None:
    """Copies `params` into each of `names`."""
    for bucket in params:
        for name in names:
            memory.flat(name, bucket).copy_(bucket.data)
