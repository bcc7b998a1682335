"""How the images of all ranks become files: every tensor once, whoever has it, in bytes that torch.save would write.

A piece is known by a hash of its values. Ranks tell each other which they have; all find alike who writes which; each
tells rank 0 where in its file they lie, and rank 0 writes the manifest. How they tell is the hosts'. The bytes are
those that torch.distributed.checkpoint keeps of a tensor; where in them the values lie is found once, here, so that
whoever reads them opens nothing but a file.
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

from workbench.host.checkpoint.image import Image

Table = dict[str, int]  # the bytes of each piece, by its hash
VALUES = "/data/0"  # where in what torch.save writes the values of a tensor are
LOCAL = 30  # bytes of a zip's header before a name


def pieces(image: Image) -> list[list[tuple[str, Tensor]]]:
    """By item, the hash and the values of each of its boxes."""
    return [[(_hash(x), x) for x in _cut(item.values, [box.sizes for box in item.boxes])] for item in image.items]


def _cut(values: Tensor, sizes: list[tuple[int, ...]]) -> Iterator[Tensor]:
    for part, shape in zip(values.split([torch.Size(s).numel() for s in sizes]) if sizes else (), sizes, strict=True):
        yield part.view(shape)


def _hash(x: Tensor) -> str:
    digest = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)} ".encode(), digest_size=16)
    digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def table(found: list[list[tuple[str, Tensor]]]) -> Table:
    """The bytes of each of a rank's pieces."""
    return {name: x.numel() * x.element_size() for item in found for name, x in item}


def dealt(tables: Sequence[Table]) -> list[set[str]]:
    """By rank which pieces it writes: each by one that has it, the one with the fewest bytes so far."""
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


def filed(found: list[list[tuple[str, Tensor]]], mine: set[str], file: Any) -> dict[str, list[Any]]:
    """Writes these pieces. By hash [where it begins, its bytes, where its values do, their bytes, dtype, sizes].

    file: has `write` and says in `nbytes` how much was written; called for the first one, for who has none makes none
    """
    todo, places, opened = set(mine), dict[str, list[Any]](), None
    for piece, x in (one for item in found for one in item):
        if piece not in todo:
            continue
        todo.remove(piece)
        opened = opened or file()
        buffer = io.BytesIO()
        torch.save(x.clone(), buffer)  # without the rest of what it is a view of
        begins, raw = opened.nbytes, buffer.getbuffer()
        nbytes = x.numel() * x.element_size()
        places[piece] = [begins, len(raw), begins + _values(buffer), nbytes, str(x.dtype)[6:], list(x.shape)]
        opened.write(raw)
    return places


def _values(buffer: io.BytesIO) -> int:
    """Where in it a tensor's values begin."""
    with zipfile.ZipFile(buffer) as archive:
        at = next(info.header_offset for info in archive.infolist() if info.filename.endswith(VALUES))
    header = buffer.getbuffer()[at : at + LOCAL]
    return at + LOCAL + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def report(image: Image, found: list[list[tuple[str, Tensor]]], places: dict[str, list[Any]],
           file: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """What a rank tells rank 0."""
    items = [[item.name, list(item.shape), [[*map(list, box)] for box in item.boxes], [piece for piece, _ in each]]
             for item, each in zip(image.items, found, strict=True)]  # fmt: skip
    return {"items": items, "said": image.said, "places": places, "file": file}


def manifest(about: dict[str, Any], reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 writes beside the files: about, and what all have told."""
    files, blobs, number = {}, list[list[Any]](), dict[str, int]()
    for rank, told in enumerate(reports):
        if told["file"] is not None:
            files[file_of(rank)] = told["file"]
        for piece, (_, _, at, nbytes, dtype, sizes) in told["places"].items():
            number[piece] = len(blobs)
            blobs.append([file_of(rank), at, nbytes, dtype, sizes])
    each = [
        {
            "items": [[name, [number[p] for p in hashes], shape, lies] for name, shape, lies, hashes in told["items"]],
            "said": told["said"],
        }
        for told in reports
    ]
    return {**about, "files": files, "blobs": blobs, "each": each}


def file_of(rank: int) -> str:
    """What rank `rank`'s file is called."""
    return f"__{rank}_0.distcp"


def catalogue(reports: Sequence[dict[str, Any]]) -> list[tuple[str, tuple[int, ...], list[list[int]], list[Any]]]:
    """(name, shape of all of it, offsets, [rank, where it begins, its bytes, ..., dtype, sizes]) of every box.

    For who puts a model together. What ranks have unlike values of, or is a rank's own, is called after the rank.
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
