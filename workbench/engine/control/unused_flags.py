"""Flags of unused parameters in shared memory. See [Note: The raised hand] in host/sharding/parameter_usage.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from workbench.engine.collectives.mapped_file import map_file


class UnusedFlags:
    """The last step in which each rank raised a hand: one int64 per rank, in a file that a host's ranks share."""

    def __init__(self, path: Path, place: int, size: int) -> None:
        self._map = map_file(path, 8 * size)
        self._steps = np.frombuffer(self._map, dtype=np.int64)
        self._place = place

    def raise_in(self, step: int) -> None:
        """Notes that this rank left a parameter out in `step`."""
        self._steps[self._place] = step + 1  # a new file holds zeros

    def raised_in(self, step: int, ranks: Iterable[int]) -> bool:
        return any(self._steps[rank] == step + 1 for rank in ranks)

    def close(self) -> None:
        self._steps = np.zeros(self._steps.size, np.int64)
        self._map.close()
