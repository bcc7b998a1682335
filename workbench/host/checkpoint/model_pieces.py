"""Assembles a model from the pieces in a manifest, without running or tracing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.host.checkpoint.restore import read_blob

if TYPE_CHECKING:
    from workbench.record.checkpoints import Checkpoint, CheckpointFiles

Places = dict[tuple[tuple[int, ...], tuple[int, ...]], int]  # blobs by (offsets, sizes)


def read_whole_model(checkpoint: Checkpoint, files: CheckpointFiles) -> dict[str, Tensor] | None:
    """Returns every whole parameter and buffer by name.

    Returns None if an element is missing or ranks hold different values of it, or if an older version wrote the
    manifest without places. Raises RunError for a damaged file.
    """
    shapes, places = dict[str, tuple[int, ...]](), dict[str, Places]()
    for name, item in _list_model_items(checkpoint):
        if item is None or shapes.setdefault(name, tuple(item[2])) != tuple(item[2]):
            return None
        known = places.setdefault(name, {})
        for blob, (offsets, sizes) in zip(item[1], item[3], strict=True):
            if known.setdefault((tuple(offsets), tuple(sizes)), blob) != blob:
                return None
    found = {name: _join_boxes(checkpoint, files, shapes[name], each) for name, each in places.items()}
    return None if any(x is None for x in found.values()) else {name: x for name, x in found.items() if x is not None}


def _list_model_items(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yields None for an item without a place."""
    for each in checkpoint.each:
        numbers = {**dict(each["said"]["parameters"]), **dict(each["said"]["beside"])}
        for name, number in numbers.items():
            item = each["items"][number]
            yield name, item if len(item) == 4 and item[0] == f"model.{name}" else None


def _join_boxes(
    checkpoint: Checkpoint, files: CheckpointFiles, shape: tuple[int, ...], places: Places
) -> Tensor | None:
    """Returns None for overlaps or gaps."""
    blobs = [checkpoint.blobs[number] for number in places.values()]
    whole = torch.zeros(shape, dtype=getattr(torch, blobs[0].dtype))
    times = torch.zeros(shape, dtype=torch.uint8)
    for (offsets, sizes), blob in zip(places, blobs, strict=True):
        inside = len(offsets) == len(shape) and all(o + n <= m for o, n, m in zip(offsets, sizes, shape, strict=True))
        if not inside or blob.sizes != sizes or blob.dtype != blobs[0].dtype:
            return None
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[where] = read_blob(blob, files)
        times[where] += 1
    return whole if bool((times == 1).all()) else None
