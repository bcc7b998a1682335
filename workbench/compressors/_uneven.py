"""Gathers tensors of different lengths from all ranks without padding: lengths first."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.rank import Rank, outlined

LENGTH_BYTES = 8  # bytes of a sent length


async def lengths_of(rank: Rank, rows: list[int], like: Tensor, name: str) -> tuple[tuple[int, ...], ...]:
    """Returns every rank's lengths: row i is rank i's `rows`. Sends (p-1) * 8 bytes per entry.

    With sizes only, it assumes that all ranks have the same `rows` as this rank.
    """
    if rank.size == 1:
        return (tuple(rows),)
    mine = torch.tensor(rows, dtype=torch.int64, device=like.device)
    return _read(await rank.all_gather(mine, name), rows)


@outlined(lambda every, rows: (tuple(rows),) * len(every))
def _read(every: Tensor, rows: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns `(size, m)` as numbers. `rows` is this rank's."""
    return tuple(map(tuple, every.tolist()))


async def gathered(rank: Rank, x: Tensor, name: str) -> list[Tensor]:
    """Returns every rank's `x` in rank order: `(m_i,)` on rank i, of one dtype.

    Bytes sent by rank i: (p-1) * (8 + m_i * element size): its length, then its elements.
    """
    if rank.size == 1:
        return [x]
    [*each] = [row[0] for row in await lengths_of(rank, [x.numel()], x, name)]
    got: list[Tensor] = await rank.all_to_allv([x] * rank.size, tuple((n,) * rank.size for n in each), name)
    return got
