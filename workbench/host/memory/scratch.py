"""A file for what a rank keeps on disk, written and read by `pwrite` and `pread`.

A mapped file would stay in memory, and so prove nothing. What was written is brought to the disk at once, and what was
written or read leaves the system's cache, so that the next read is the disk's again (where the file lies on one).
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 16  # bytes: each tensor begins at such a place, so that it can be looked at where it was read to


class Extent(NamedTuple):
    """Where tensors lie in the file, one after the other, and what they are.

    pieces: of each its shape, its dtype, and the byte of the extent that it begins with
    """

    at: int
    nbytes: int
    pieces: tuple[tuple[torch.Size, torch.dtype, int], ...]


class Scratch:
    """One rank's file, made when first written to, in the directory for temporary files (TMPDIR).

    It has no name, so that it is gone with this object, or with its process.
    Threads may read and write at once, each an extent of its own. Raises OSError where the disk is full or fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._end = self._used = 0  # bytes of the file, and extents in it
        self._free: dict[int, list[int]] = defaultdict(list)  # by length, where such a hole is

    def write(self, tensors: list[Tensor]) -> Extent:
        """Puts tensors that lie in the host's memory where there is room for them, at once."""
        pieces, nbytes = list[tuple[torch.Size, torch.dtype, int]](), 0
        for x in tensors:
            pieces.append((x.shape, x.dtype, nbytes))
            nbytes += -(-x.numel() * x.element_size() // ALIGN) * ALIGN
        joined = torch.zeros(nbytes, dtype=torch.uint8)
        for x, (_, _, begin) in zip(tensors, pieces, strict=True):
            own = x.detach().contiguous().reshape(-1).view(torch.uint8)
            joined[begin : begin + own.numel()] = own
        with self._lock:
            if self._fd < 0:
                with tempfile.TemporaryFile(prefix="workbench-offload-") as made:
                    self._fd = os.dup(made.fileno())
                weakref.finalize(self, os.close, self._fd)
            holes = self._free[nbytes]
            at = holes.pop() if holes else self._end
            self._used += 1
            self._end = max(self._end, at + nbytes)
        left, to = _bytes(joined), at
        while left:
            done = os.pwrite(self._fd, left, to)
            left, to = left[done:], to + done
        os.fdatasync(self._fd)
        self._forget(at, nbytes)
        return Extent(at, nbytes, tuple(pieces))

    def read(self, place: Extent) -> list[Tensor]:
        """The tensors that were written there, in new memory of the host."""
        joined = torch.empty(place.nbytes, dtype=torch.uint8)
        left, at = _bytes(joined), place.at
        while left:
            done = os.preadv(self._fd, [left], at)
            if not done:
                raise OSError(f"the file of what is kept on disk ends before byte {at}")
            left, at = left[done:], at + done
        self._forget(place.at, place.nbytes)
        return [joined[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
                for shape, dtype, begin in place.pieces]  # fmt: skip

    def free(self, place: Extent) -> None:
        """Nobody reads that again: its room may be written to."""
        with self._lock:
            self._free[place.nbytes].append(place.at)
            self._used -= 1
            if not self._used:  # the disk is free again, and what comes next may be of other sizes
                self._free.clear()
                self._end = 0
                os.ftruncate(self._fd, 0)

    def _forget(self, at: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not on every system
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_DONTNEED)


def _bytes(x: Tensor) -> memoryview:
    """A tensor's memory, byte by byte; what is written into it is the tensor's."""
    return memoryview(x.numpy())  # type: ignore[arg-type]
