"""Shared by strategies with a server: its messages with ranks, and both sides' copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from workbench.rank import Bucket, Rank
from workbench.strategies._copies import copies


class Copies:
    """One rank's copies of the parameters.

    Slot "base" has its parameters at the last fetch from the server or the last push. On a server, slot "centre" has
    the server's parameters.
    """

    def __init__(self, params: list[Bucket]) -> None:
        self.memory = copies(params, "base", "centre")


async def tell(rank: Rank, to: int, kind: str, *numbers: int) -> None:
    """Sends a heading: a few whole numbers."""
    await rank.send(torch.tensor(numbers, dtype=torch.int64), to, kind)


async def told(rank: Rank, kind: str, source: int | None = None) -> tuple[list[int], int] | None:
    """Returns the next heading of `kind` and its sender; None when no more can arrive."""
    got = await rank.recv(None, source, kind)
    return None if got is None else (got[0].tolist(), got[1])


async def answer(rank: Rank, server: int) -> list[int]:
    """Returns the heading of the next answer of `server`."""
    numbers, _ = await rank.recv(None, server, "answer")
    return list(numbers.tolist())


async def post(rank: Rank, to: int, what: str, buckets: Iterable[Bucket]) -> None:
    """Sends buckets, each as its own message."""
    for bucket in buckets:
        await rank.send(bucket.data, to, f"{what} {bucket.name}")


async def taken(rank: Rank, source: int, what: str, buckets: Iterable[Bucket]) -> list[Bucket]:
    """Receives the buckets that `source` posted, shaped like `buckets`, into new memory."""
    found = []
    for bucket in buckets:
        data, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), source, f"{what} {bucket.name}")
        found.append(bucket.like(data))
    return found


def leaves_none(servers: int, size: int) -> str | None:
    """Returns why `servers` of `size` ranks leave none to train, with an alternative, or None."""
    if servers < size:
        return None
    return f"servers={servers} leaves none of {size} ranks to train; use at most {size - 1}, or more ranks"


def dense_only(name: str, compressor: Any) -> str | None:
    """Returns why `compressor` cannot work with a strategy that sends messages; or None."""
    if compressor.immediate:
        return None
    return f"{name} sends messages, which {compressor} cannot encode; use Dense with it, or LocalSGD or DDP"
