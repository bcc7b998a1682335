"""Flags of unused parameters in shared memory. See [Note: The raised hand] in host/sharding/parameter_usage.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from workbench.engine.collectives.mapped_file import map_file

_BUCKET_BITS = 24


class UnusedFlags:
    """The last step in which each rank raised a hand, and the first bucket that the hand is for.

    One int64 per rank, in a file that a host's ranks share: the upper bits have the step + 1, the lower the bucket. A
    new file holds zeros.
    """

    def __init__(self, path: Path, place: int, size: int) -> None:
        self._map = map_file(path, 8 * size)
        self._flags = np.frombuffer(self._map, dtype=np.int64)
        self._place = place

    def raise_in(self, step: int, bucket: int) -> None:
        """Notes that this rank lacks a gradient of `bucket` in `step`."""
        if not self.raised_in(step, [self._place], bucket):
            self._flags[self._place] = (step + 1 << _BUCKET_BITS) + bucket

    def raised_in(self, step: int, ranks: Iterable[int], bucket: int | None) -> bool:
        """Whether one of `ranks` raised a hand in `step`, for a bucket up to `bucket`, or for any bucket if None."""
        low = step + 1 << _BUCKET_BITS
        high = low + (1 << _BUCKET_BITS) - 1 if bucket is None else low + bucket
        return any(low <= self._flags[rank] <= high for rank in ranks)

    def close(self) -> None:
        self._flags = np.zeros(self._flags.size, np.int64)
        self._map.close()
