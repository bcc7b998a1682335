"""Gives the system back the memory that allocators keep of what was let go."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pyarrow as pa

EVERY = 30.0  # seconds


def give_back() -> None:
    """Gives back all that is free: allocators keep it else, as much as a record itself and more."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


class Tidy:
    """Does so again and again, where something goes on for hours: it takes a millisecond or two."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def due(self) -> None:
        """Gives back, where that was not done for `EVERY` seconds."""
        if time.monotonic() - self._at > EVERY:
            self._at = time.monotonic()
            give_back()
