"""The mean over ranks through a codec: encoded for the rank that sums, then for all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.compressors import Coder
from workbench.rank import Rank, each, outlined


async def mean(rank: Rank, x: Tensor, coder: Coder, name: str) -> Tensor:
    """Returns about the mean over ranks, bit-identical on all ranks: `(n,)` -> `(n,)` float32.

    Each rank sums one of `size` chunks in float32 and sends the encoded sum to all ranks. A rank sends the bytes of 2
    (p-1) payloads of ceil(n / p) elements. An all-gather of every rank's codes would send p-1 payloads of n.
    """
    n, size = x.numel(), rank.size
    chunk = -(-n // size)
    like = x.new_empty(chunk, dtype=torch.float32)
    rows = _encoded(pad(x, (0, size * chunk - n)).view(size, chunk), coder)
    got = [await rank.all_to_all(part, name) for part in rows]
    total = torch.stack([coder.decode(one, like) for one in zip(*map(each, got), strict=True)]).sum(0)
    every = [await rank.all_gather(part, name) for part in coder.encode(total / size)]
    return _decoded(every, coder, like)[:n]


def _outlined(rows: Tensor, coder: Coder) -> list[Tensor]:
    return [part.new_empty((len(rows), *part.shape)) for part in coder.encode(rows[0])]


@outlined(_outlined)
def _encoded(rows: Tensor, coder: Coder) -> list[Tensor]:
    """Returns each row's payload, part by part: `(rows, ...)`."""
    return [torch.stack(parts) for parts in zip(*(coder.encode(row) for row in rows), strict=True)]


@outlined(lambda every, coder, like: like.new_empty(len(every[0]) * like.numel()))
def _decoded(every: list[Tensor], coder: Coder, like: Tensor) -> Tensor:
    return torch.cat([coder.decode(one, like) for one in zip(*every, strict=True)])
