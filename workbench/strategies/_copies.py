"""Copies of the parameters that a strategy keeps: an anchor, a centre, what neighbours know."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.rank import Bucket, Memory


def copies(params: Sequence[Bucket], *slots: str) -> Memory:
    """A Memory that holds a copy of `params` in each of `slots`: where all ranks are equal, everybody's."""
    memory = Memory()
    keep(memory, params, *slots)
    return memory


def keep(memory: Memory, params: Sequence[Bucket], *slots: str) -> None:
    """Copies `params` into each of `slots`."""
    for bucket in params:
        for slot in slots:
            memory.flat(slot, bucket).copy_(bucket.data)
