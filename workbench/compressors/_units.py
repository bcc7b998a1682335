"""Cuts a bucket into units that are sent whole or not at all: matrix rows or single elements.

Assigns units to owners, and packs units with their values into messages.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.compressors._two_hop import packed, unpacked
from workbench.rank import Bucket, Part

LOW_BITS = 0xFFFFFFFF  # the low 32 bits


class UnitBlock(NamedTuple):
    """The units of one parameter, their width in elements and the place of the first element."""

    name: str
    start: int
    units: int
    width: int


class Units:
    """A bucket's units in bucket order.

    With `rows`, each row of a matrix is a unit (dimensions after the first are joined). Else each element is a unit.
    """

    def __init__(self, bucket: Bucket, rows: bool) -> None:
        self.rows, self.numel, self.device = rows, bucket.data.numel(), bucket.data.device
        parts = bucket.parts or (Part("", (self.numel,), 0, self.numel),)
        self.blocks = tuple(_block(part, rows) for part in parts if part.stop > part.start)
        self.count = sum(block.units for block in self.blocks)

    @property
    def single(self) -> bool:
        return self.count == self.numel

    def touched(self, nonzero: Tensor) -> Tensor:
        """Returns the units with at least one nonzero element: bool `(n,)` -> bool `(units,)`."""
        if self.single:
            return nonzero
        each = [nonzero[b.start : b.start + b.units * b.width].reshape(b.units, b.width).any(1) for b in self.blocks]
        return torch.cat(each)

    def held(self, touched: Tensor) -> int:
        """Returns the number of elements in these units, a bool `(units,)`."""
        return int(touched.count_nonzero()) if self.single else int(self._widths[touched].sum())

    def elements(self, index: Tensor) -> Tensor:
        """Returns the units' elements in the bucket, unit by unit: `(k,)` int64 -> `(v,)` int64."""
        if self.single:
            return index
        widths, starts = self._widths[index], self._starts[index]
        ends = widths.cumsum(0)
        v = int(ends[-1]) if len(ends) else 0
        shift = torch.repeat_interleave(starts - ends + widths, widths, output_size=v)
        return shift.add_(torch.arange(v, device=self.device))

    def owners(self, size: int) -> Tensor:
        """Returns each unit's owner of `size` ranks, by the parameter's name and the place in it: `(units,)` int16."""
        each = [mixed(b.name, torch.arange(b.units, device=self.device)) for b in self.blocks]
        return ((torch.cat(each) * size) >> 32).to(torch.int16)

    @cached_property
    def _starts(self) -> Tensor:
        each = [torch.arange(b.units, device=self.device) * b.width + b.start for b in self.blocks]
        return torch.cat(each)

    @cached_property
    def _widths(self) -> Tensor:
        return torch.cat([torch.full((b.units,), b.width, device=self.device) for b in self.blocks])


def _block(part: Part, rows: bool) -> UnitBlock:
    numel = part.stop - part.start
    units = part.shape[0] if rows and len(part.shape) > 1 else numel
    return UnitBlock(part.name, part.start, units, numel // units)


def mixed(name: str, index: Tensor) -> Tensor:
    """Returns pseudo-random numbers below 2^32 for places inside a parameter: `(k,)` int64 -> `(k,)` int64.

    Uses the last steps of MurmurHash3 on whole vectors. The result is independent of buckets and offsets, so a place
    keeps its number when buckets are recut.
    """
    h = (index * 0x9E3779B1 + zlib.crc32(name.encode())) & LOW_BITS
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & LOW_BITS
    return h ^ (h >> 16)


class Owned(NamedTuple):
    """The owners of units.

    owner: by unit (units,) int16
    order: the units of rank 0, then of rank 1, and so on: `(units,)` int32
    counts: the number of units of each rank
    """

    owner: Tensor
    order: Tensor
    counts: tuple[int, ...]

    @classmethod
    def among(cls, units: Units, size: int) -> Owned:
        owner = units.owners(size)
        counts = torch.bincount(owner, minlength=size).tolist()
        return cls(owner, owner.argsort(stable=True).to(torch.int32), tuple(counts))

    def lists(self) -> tuple[Tensor, ...]:
        """Returns each rank's units, ascending: `(m,)` int32 each."""
        return self.order.split(self.counts)


def size(k: float, v: float, width: int) -> int:
    """Bytes of a message of k units that hold v values of `width` bytes: 0 if k is 0."""
    return round(4 + 4 * k + width * v) if k else 0


def message(units: Units, x: Tensor, index: Tensor) -> Tensor:
    """Returns the number of units, their indices and their values in `x`: `(4 + 4 k + v * element size,)` uint8."""
    k = index.numel()
    if not k:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    numbers = torch.cat([index.new_tensor([k]), index]).to(torch.int32)
    return torch.cat([numbers.view(torch.uint8), x[units.elements(index)].view(torch.uint8)])


def opened(message: Tensor, units: Units, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns units `(k,)` int64, their elements `(v,)` int64 and the values `(v,)` from the output of `message`."""
    if not message.numel():
        none = torch.empty(0, dtype=torch.int64, device=message.device)
        return none, none, torch.empty(0, dtype=dtype, device=message.device)
    k = int(message[:4].clone().view(torch.int32))
    index = message[4 : 4 + 4 * k].clone().view(torch.int32).long()
    return index, units.elements(index), message[4 + 4 * k :].clone().view(dtype)


def bitmap(held: Tensor) -> Tensor:
    """Packs a bool `(m,)` into `(ceil(m / 8),)` uint8: a bit each."""
    return packed(held.view(torch.uint8)[None], 1)[0] if held.numel() else held.view(torch.uint8)


def flags(bits: Tensor, m: int) -> Tensor:
    """Restores the m flags from `bitmap`: (m,) bool."""
    return unpacked(bits[None], 1, m)[0].bool() if m else bits.bool()
