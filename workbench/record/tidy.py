"""Gives the system back the memory that allocators keep of what was let go."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pyarrow as pa

EVERY = 30.0  # seconds, of ranks
OFTEN = 5.0  # of who reads the record: what a view needs for a moment grows with it


def give_back() -> None:
    """Gives back all that is free: allocators keep it else, as much as a record itself and more."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


class Tidy:
    """Does so again and again, where something goes on for hours: it takes a millisecond or two."""

    def __init__(self, every: float = EVERY) -> None:
        self.every = every  # seconds
        self._at = time.monotonic()

    def due(self) -> None:
        """Gives back, where that was not done for so long."""
        if time.monotonic() - self._at > self.every:
            self._at = time.monotonic()
            give_back()
