"""A file for a rank's state on disk, accessed with `pwrite` and `pread`.

A mapped file would stay in memory. Here pages leave the system's cache after each access, so reads come from the disk.
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

ALIGN_BYTES = 16


class FileExtent(NamedTuple):
    """Tensors in the file.

    pieces: each tensor's shape, dtype, and first byte in the extent
    """

    at: int
    nbytes: int
    pieces: tuple[tuple[torch.Size, torch.dtype, int], ...]


class ScratchFile:
    """One rank's file, made in TMPDIR at the first write. Raises OSError if the disk is full or fails.

    It has no name, so it disappears with this object or its process. Threads may access different extents at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._end = self._used = 0  # file's bytes; used extents
        self._free: dict[int, list[int]] = defaultdict(list)  # by length

    def write_tensors(self, tensors: list[Tensor]) -> FileExtent:
        """Writes and syncs tensors."""
        pieces, nbytes = list[tuple[torch.Size, torch.dtype, int]](), 0
        for x in tensors:
            pieces.append((x.shape, x.dtype, nbytes))
            nbytes += -(-x.numel() * x.element_size() // ALIGN_BYTES) * ALIGN_BYTES
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
        left, to = _view_bytes(joined), at
        while left:
            done = os.pwrite(self._fd, left, to)
            left, to = left[done:], to + done
        os.fdatasync(self._fd)
        self._drop_pages(at, nbytes)
        return FileExtent(at, nbytes, tuple(pieces))

    def read_tensors(self, place: FileExtent) -> list[Tensor]:
        joined = torch.empty(place.nbytes, dtype=torch.uint8)
        left, at = _view_bytes(joined), place.at
        while left:
            done = os.preadv(self._fd, [left], at)
            if not done:
                raise OSError(f"the file of offloaded state on disk ends before byte {at}")
            left, at = left[done:], at + done
        self._drop_pages(place.at, place.nbytes)
        return [joined[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
                for shape, dtype, begin in place.pieces]  # fmt: skip

    def free_extent(self, place: FileExtent) -> None:
        with self._lock:
            self._free[place.nbytes].append(place.at)
            self._used -= 1
            if not self._used:  # new extents may have other lengths
                self._free.clear()
                self._end = 0
                os.ftruncate(self._fd, 0)

    def _drop_pages(self, at: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not everywhere
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_DONTNEED)


def _view_bytes(x: Tensor) -> memoryview:
    """Writing changes the tensor."""
    return memoryview(x.numpy())  # type: ignore[arg-type]
