"""Sends one bucket with several compressors, one for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.compressors._base import Compressor, inside
from workbench.compressors._range import wide
from workbench.rank import Bucket, Memory, Part, Rank


async def by_part(chosen: Sequence[Compressor], rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
    """`Compressor.reduce` with a choice for each of the bucket's parts, which must be the same on all ranks.

    Parts with equal compressors are coded together, in the order of their first parts. They form a smaller bucket of
    the same name. If all compressors are equal, the bucket itself is reduced. Otherwise each part is copied twice.
    """
    groups: dict[Compressor, list[Part]] = {}
    for part, of in zip(bucket.parts, chosen, strict=True):
        groups.setdefault(of, []).append(part)
    if len(groups) == 1:
        [of] = groups
        return await of.reduce(rank, bucket, memory)
    done = []
    for of, parts in groups.items():
        piece = gathered_parts(bucket, parts)
        done.append((parts, await of.reduce(rank, piece, memory), piece.data))
    own = None
    if any(share is not None for _, share, _ in done):
        own = bucket.data.to(wide(bucket.data.dtype), copy=True)  # still the input
        for parts, share, _ in done:
            if share is not None:
                _put_back(own, parts, share)
    for parts, _, total in done:
        _put_back(bucket.data, parts, total)
    return own


def gathered_parts(bucket: Bucket, parts: Sequence[Part]) -> Bucket:
    """Copies these parts of `bucket` into a bucket of the same name. Memory by parameter stays valid for it."""
    data = torch.cat([bucket.data[part.start : part.stop] for part in parts])
    shifted, at = [], 0
    for part in parts:
        shifted.append(part._replace(start=at, stop=(at := at + part.stop - part.start)))
    return Bucket(bucket.index, data, tuple(shifted), bucket.offset + parts[0].start)


def _put_back(x: Tensor, parts: Sequence[Part], values: Tensor) -> None:
    at = 0
    for part in parts:
        x[part.start : part.stop] = values[at : (at := at + part.stop - part.start)]


def twice(outer: Compressor) -> str | None:
    """Returns why a compressor with memory by parameter cannot contain its own kind; else None."""
    name = type(outer).__name__
    if sum(isinstance(one, type(outer)) for one in inside(outer)) == 1:
        return None
    return (
        f"{name} inside {name}: both would keep their state under one name; use one of them, with the compressor "
        f"of the inner one"
    )


def split_momentum(*sides: Compressor) -> str | None:
    """Returns why these cannot alternate if only some of them keep the optimizer's momentum; else None."""
    keeping = [next((type(c).__name__ for c in inside(side) if c.carries), "") for side in sides]
    if all(keeping) or not any(keeping):
        return None
    name = max(keeping)
    return (
        f"compressor={name}: it keeps the optimizer's momentum, and gradients that the other compressor sends would "
        f"have none; use {name}(momentum=0), or {name} for both"
    )
