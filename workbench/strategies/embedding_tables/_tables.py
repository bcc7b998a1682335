"""Embedding tables for strategies with servers: separate from other parameters, rows packed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from workbench.rank import Bucket, Part

Rows = dict[str, Tensor]  # by table, row numbers: (n,) int64


def without(buckets: Iterable[Bucket], tables: Collection[str]) -> list[Bucket]:
    """Returns the stretches of these buckets between tables, as buckets that view them."""
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
    """Returns the tables in these buckets by name, in the order of `names`, as `(rows, width)` views."""
    lie = {p.name: b.data[p.start : p.stop].view(p.shape) for b in buckets for p in b.parts}
    return {name: lie[name] for name in names}


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Returns matrices concatenated: (n,)."""
    return torch.cat([part.reshape(-1) for part in parts])


def put(tables: dict[str, Tensor], rows: Rows, flat: Tensor) -> None:
    """Writes concatenated rows to their places in `tables`."""
    for name, values in parted(rows, flat, tables):
        tables[name][rows[name]] = values.to(tables[name].device)


def parted(rows: Rows, flat: Tensor, tables: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields each table's rows `(n, width)` from the concatenated `flat`, in the order of `rows`."""
    widths = {name: tables[name].shape[1] for name in rows}
    for (name, width), piece in zip(
        widths.items(), flat.split([len(rows[name]) * widths[name] for name in rows]), strict=True
    ):
        yield name, piece.view(-1, width)
