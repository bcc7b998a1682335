"""Writes the images of all ranks into files, each tensor once.

Ranks exchange their pieces' hashes, and each computes which rank writes which piece. Rank 0 writes the manifest.
The bytes are those of torch.save and torch.distributed.checkpoint. With the manifest's offsets, a reader needs neither
zip nor pickle.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.host.checkpoint.rank_image import RankImage

PieceSizes = dict[str, int]  # bytes by hash
VALUES_ENTRY = "/data/0"  # values' zip entry
ZIP_HEADER_BYTES = 30  # before the name


def hash_pieces(image: RankImage) -> list[list[tuple[str, Tensor]]]:
    """Hashes each item's boxes."""
    return [
        [(_hash_tensor(x), x) for x in _cut_boxes(item.values, [box.sizes for box in item.boxes])]
        for item in image.items
    ]


def _cut_boxes(values: Tensor, sizes: list[tuple[int, ...]]) -> Iterator[Tensor]:
    for part, shape in zip(values.split([torch.Size(s).numel() for s in sizes]), sizes, strict=True):
        yield part.view(shape)


def _hash_tensor(x: Tensor) -> str:
    digest = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)} ".encode(), digest_size=16)
    digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def measure_pieces(found: list[list[tuple[str, Tensor]]]) -> PieceSizes:
    """Returns bytes by piece."""
    return {name: x.numel() * x.element_size() for item in found for name, x in item}


def assign_writers(tables: Sequence[PieceSizes]) -> list[set[str]]:
    """Assigns each piece to the least loaded owner."""
    mine: list[set[str]] = [set() for _ in tables]
    load = Counter[int]()
    have: dict[str, list[int]] = {}
    for rank, each in enumerate(tables):
        for piece in each:
            have.setdefault(piece, []).append(rank)
    for piece, ranks in sorted(have.items(), key=lambda one: (-tables[one[1][0]][one[0]], one[0])):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += tables[writer][piece]
        mine[writer].add(piece)
    return mine


def write_pieces(found: list[list[tuple[str, Tensor]]], mine: set[str], file: Any) -> dict[str, list[Any]]:
    """Returns by hash [start, bytes, start of the values, their bytes, dtype, sizes].

    file: opens a file with `write` and `nbytes`, the bytes written; called for the first piece
    """
    todo, places, opened = set(mine), dict[str, list[Any]](), None
    for piece, x in (one for item in found for one in item):
        if piece not in todo:
            continue
        todo.remove(piece)
        opened = opened or file()
        buffer = io.BytesIO()
        torch.save(x.clone(), buffer)  # without the storage behind the view
        begins, raw = opened.nbytes, buffer.getbuffer()
        nbytes = x.numel() * x.element_size()
        places[piece] = [begins, len(raw), begins + _find_values(buffer), nbytes, str(x.dtype)[6:], list(x.shape)]
        opened.write(raw)
    return places


def _find_values(buffer: io.BytesIO) -> int:
    with zipfile.ZipFile(buffer) as archive:
        at = next(info.header_offset for info in archive.infolist() if info.filename.endswith(VALUES_ENTRY))
    header = buffer.getbuffer()[at : at + ZIP_HEADER_BYTES]
    return at + ZIP_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def make_report(image: RankImage, found: list[list[tuple[str, Tensor]]], places: dict[str, list[Any]],
           file: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """Makes a rank's report."""
    items = [[item.name, list(item.shape), [[*map(list, box)] for box in item.boxes], [piece for piece, _ in each]]
             for item, each in zip(image.items, found, strict=True)]  # fmt: skip
    return {"items": items, "said": image.entries, "places": places, "file": file}


def make_manifest(about: dict[str, Any], reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins all reports."""
    files, blobs, number = {}, list[list[Any]](), dict[str, int]()
    for rank, told in enumerate(reports):
        if told["file"] is not None:
            files[name_file(rank)] = told["file"]
        for piece, (_, _, at, nbytes, dtype, sizes) in told["places"].items():
            number[piece] = len(blobs)
            blobs.append([name_file(rank), at, nbytes, dtype, sizes])
    each = [
        {
            "items": [[name, [number[p] for p in hashes], shape, lies] for name, shape, lies, hashes in told["items"]],
            "said": told["said"],
        }
        for told in reports
    ]
    return {**about, "files": files, "blobs": blobs, "each": each}


def name_file(rank: int) -> str:
    """Names a rank's file."""
    return f"__{rank}_0.distcp"


def list_boxes(reports: Sequence[dict[str, Any]]) -> list[tuple[str, tuple[int, ...], list[list[int]], list[Any]]]:
    """Returns (name, whole shape, offsets, [rank, start, bytes, ..., dtype, sizes]) of every box.

    The name includes the rank if values differ, or if the tensor is a rank's own.
    """
    where = {piece: [rank, *place] for rank, told in enumerate(reports) for piece, place in told["places"].items()}
    seen: dict[str, dict[Any, set[str]]] = {}
    for told in reports:
        for name, shape, lies, hashes in told["items"]:
            for box, piece in zip(lies, hashes, strict=True):
                seen.setdefault(name, {}).setdefault((*map(tuple, box),), set()).add(piece)
            seen.setdefault(name, {}).setdefault("shape", set()).add(str((shape, [where[p][5] for p in hashes][:1])))
    apart = {name for name, each in seen.items() if any(len(one) > 1 for one in each.values())}
    found: dict[tuple[str, str], Any] = {}
    for rank, told in enumerate(reports):
        for at, (name, shape, lies, hashes) in enumerate(told["items"]):
            called = f"rank.{rank}.{name or at}" if not name or name in apart else name
            for box, piece in zip(lies, hashes, strict=True):
                found[called, str(box)] = called, tuple(shape), box, where[piece]
    return list(found.values())
