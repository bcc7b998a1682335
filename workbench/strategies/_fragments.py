"""A model cut into fragments by its layers, independent of its buckets."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.rank import Bucket, Part


def layers(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Returns the parameters by layer, both in the order of their names. A layer is a module with parameters of its
    own.

    Numbers count as numbers: `blocks.10` comes after `blocks.9`. The order of buckets changes with their size.
    """
    found: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda p: _natural(p.name)):
        found.setdefault(part.name.rpartition(".")[0], []).append(part)
    return found


def fragments(parts: Sequence[Part], count: int) -> list[list[str]]:
    """Returns the parameter names of each of `count` fragments, with whole layers.

    From the largest to the smallest, each layer goes to the smallest fragment so far. So for layers of equal size,
    fragment f has layers f, f + count, f + 2 count and so on.
    """
    every = sorted(layers(parts).values(), key=_numel, reverse=True)
    held: list[list[Part]] = [[] for _ in range(count)]
    for layer in every:
        min(held, key=_numel).extend(layer)
    return [[part.name for part in its] for its in held]


class Fragment:
    """One fragment of the parameters: views into the buckets, and a copy of them as a Bucket."""

    __slots__ = ("bucket", "views")

    def __init__(self, index: int, names: Sequence[str], buckets: Sequence[Bucket]) -> None:
        found = {part.name: (part, bucket.data[part.start : part.stop]) for bucket in buckets for part in bucket.parts}
        self.views = [found[name][1] for name in names]
        parts, at = [], 0
        for name in names:
            part = found[name][0]
            parts.append(Part(name, part.shape, at, at := at + part.stop - part.start))
        self.bucket = Bucket(index, torch.cat(self.views), tuple(parts), 0)

    def write(self, data: Tensor) -> None:
        """Writes (n,) into the model's parameters."""
        for view, piece in zip(self.views, data.split([view.numel() for view in self.views]), strict=True):
            view.copy_(piece)


def fragment(buckets: Sequence[Bucket], index: int, count: int) -> Fragment:
    """Returns one of `count` fragments of the current parameters in `buckets`."""
    names = fragments([part for bucket in buckets for part in bucket.parts], count)
    return Fragment(index, names[index], buckets)


def _numel(parts: list[Part]) -> int:
    return sum(part.stop - part.start for part in parts)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]
