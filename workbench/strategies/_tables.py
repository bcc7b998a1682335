"""What a strategy with embedding servers needs of tables: apart from all else, and rows of theirs end to end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from workbench.rank import Bucket, Part

Rows = dict[str, Tensor]  # by table, which rows: (n,) int64


def without(buckets: Iterable[Bucket], tables: Collection[str]) -> list[Bucket]:
    """What of these buckets belongs to no table: of each its stretches between tables, which view it."""
    found = []
    for bucket in buckets:
        for is_table, run in groupby(bucket.parts, lambda part: part.name in tables):
            if not is_table:
                parts = list(run)
                start, stop = parts[0].start, parts[-1].stop
                moved = tuple(Part(p.name, p.shape, p.start - start, p.stop - start) for p in parts)
                found.append(Bucket(bucket.index, bucket.data[start:stop], moved, bucket.offset + start))
    return found


def tables_in(buckets: Iterable[Bucket], names: Collection[str]) -> dict[str, Tensor]:
    """By name, in the order of `names`, the tables as they lie in these buckets: (rows, width) views."""
    lie = {p.name: b.data[p.start : p.stop].view(p.shape) for b in buckets for p in b.parts}
    return {name: lie[name] for name in names}


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Matrices end to end: (n,)."""
    return torch.cat([part.reshape(-1) for part in parts])


def put(tables: dict[str, Tensor], rows: Rows, flat: Tensor) -> None:
    """Writes rows that came end to end where they belong."""
    for name, values in parted(rows, flat, tables):
        tables[name][rows[name]] = values.to(tables[name].device)


def parted(rows: Rows, flat: Tensor, tables: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(n, width) of each table, in the order of `rows`, of what came end to end."""
    widths = {name: tables[name].shape[1] for name in rows}
    for (name, width), piece in zip(
        widths.items(), flat.split([len(rows[name]) * widths[name] for name in rows]), strict=True
    ):
        yield name, piece.view(-1, width)
