"""What strategies with a server share: messages between it and the ranks, and what each side keeps of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from workbench.rank import Bucket, Rank
from workbench.strategies._copies import copies


class Copies:
    """What one rank keeps of the parameters.

    In "base" its own as they were when they were last the server's or were last pushed; in "centre", on a rank that
    serves, the server's.
    """

    def __init__(self, params: list[Bucket]) -> None:
        self.memory = copies(params, "base", "centre")


async def tell(rank: Rank, to: int, kind: str, *numbers: int) -> None:
    """Sends a heading: a few whole numbers."""
    await rank.send(torch.tensor(numbers, dtype=torch.int64), to, kind)


async def told(rank: Rank, kind: str, source: int | None = None) -> tuple[list[int], int] | None:
    """The next heading of `kind` and who sent it; None when nothing more can come."""
    got = await rank.recv(None, source, kind)
    return None if got is None else (got[0].tolist(), got[1])


async def answer(rank: Rank, server: int) -> list[int]:
    """The heading of what `server` answers."""
    numbers, _ = await rank.recv(None, server, "answer")
    return list(numbers.tolist())


async def post(rank: Rank, to: int, what: str, buckets: Iterable[Bucket]) -> None:
    """Sends buckets, each as a message of its own."""
    for bucket in buckets:
        await rank.send(bucket.data, to, f"{what} {bucket.name}")


async def taken(rank: Rank, source: int, what: str, buckets: Iterable[Bucket]) -> list[Bucket]:
    """What `source` posted for the places of `buckets`, in new memory."""
    found = []
    for bucket in buckets:
        data, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), source, f"{what} {bucket.name}")
        found.append(bucket.like(data))
    return found


def leaves_none(servers: int, size: int) -> str | None:
    """Why `size` ranks cannot train with so many servers among them, in a sentence that says what would do; or None."""
    if servers < size:
        return None
    return f"servers={servers} leaves none of {size} ranks to train; use at most {size - 1}, or more ranks"


def dense_only(name: str, compressor: Any) -> str | None:
    """Why `compressor` cannot work where messages carry what is exchanged; or None."""
    if compressor.immediate:
        return None
    return f"{name} sends messages, which {compressor} cannot encode; use Dense with it, or LocalSGD or DDP"
