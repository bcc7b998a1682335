"""Reads rows from the ranks' disks: a kernel needs them after attaching or lost messages, or on another host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.cluster.transport.row_encoding import RowBatch, cut_columns, decode_batches, encode_batch
from workbench.record import store

CHUNK_BYTES = 1 << 20  # bytes per message

RowPieces = list[tuple[int, dict[str, Any]]]


def read_pieces(path: Path, kind: str, rank: int, start: int = 0) -> RowPieces:
    """Returns (number of the first row, columns) of each stretch on disk, from row `start` on."""
    found = []
    for part in store.parts(path):
        if (part.kind, part.rank) != (kind, rank):
            continue
        first, columns, _ = store.read_part(part.path)
        if columns is None or first + len(columns["rank"]) <= start:
            continue
        skip = max(start - first, 0)
        found.append((first + skip, cut_columns(columns, skip)))
    store.release_free_memory()
    return found


def pack_pieces(found: RowPieces, kind: str, rank: int) -> bytes:
    """Packs pieces into one blob."""
    out = []
    for first, columns in found:
        frames = encode_batch(RowBatch("", kind, rank, first, columns))
        out += [len(f).to_bytes(8, "little") + f for f in frames]
    return b"".join(out)


def unpack_pieces(blob: bytes) -> RowPieces:
    """Reverses `pack_pieces`."""
    frames, at = [], 0
    while at < len(blob):
        n = int.from_bytes(blob[at : at + 8], "little")
        frames.append(blob[at + 8 : at + 8 + n])
        at += 8 + n
    return [(b.seq, b.columns) for b in decode_batches(frames)]


def list_files(path: Path, rank: int) -> list[list[Any]]:
    """Returns [name, bytes] of a rank's stream files."""
    return [[p.path.name, p.path.stat().st_size] for p in store.parts(path) if p.rank == rank]


def read_chunk(path: Path, name: str, start: int) -> bytes:
    """Returns part of a stream file."""
    with open(path / Path(name).name, "rb") as f:
        f.seek(start)
        return f.read(CHUNK_BYTES)


def copy_files(listing: list[list[Any]], read: Callable[[str, int], bytes], into: Path) -> None:
    """Copies a remote rank's files into the run directory here."""
    for name, size in listing:
        with open(into / Path(name).name, "wb", opener=store.private) as f:
            while f.tell() < size and (data := read(name, f.tell())):
                f.write(data)


def add_marks(path: Path, rank: int, marks: list[tuple[int, str, float, dict[str, Any]]]) -> None:
    """Adds marks (step, name, t, detail) to the record of a rank that cannot write them."""
    found = read_pieces(path, "marks", rank)
    first = max((seq + len(columns["rank"]) for seq, columns in found), default=0)
    steps, names, times, details = zip(*marks, strict=True)
    columns = {"rank": [rank] * len(marks), "step": steps, "name": names, "t": times}
    writer = store.Writer(path, "marks", rank, first)
    writer.append({**columns, "detail": [json.dumps(d) for d in details]})
    writer.close()
