"""Gives the system back the memory that allocators keep of what was let go."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pyarrow as pa

EVERY = 30.0  # seconds, of ranks
OFTEN = 5.0  # of who reads the record: what a view needs for a moment grows with it
TRIM, MMAP = -1, -3  # what mallopt calls its thresholds,
MOST = 32 << 20  # bytes: and the most to which glibc itself raises the second one, the first to twice that


def give_back() -> None:
    """Gives back all that is free: allocators keep it else, as much as a record itself and more."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def give_back_own() -> None:
    """Gives back what is free at the end of the stretch from which this thread has its memory.

    malloc_trim leaves that where the thread is not the first (glibc 2.36): tens of MB for each that has needed them for
    a moment. It goes when a block is freed while the threshold is low; then that is what glibc itself would come to.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        get, free = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc)), libc.free
        libc.mallopt(TRIM, 1 << 18)
        free(ctypes.c_void_p(get(100_000)))  # of more than 64 kB, at which it looks
        libc.mallopt(MMAP, MOST)
        libc.mallopt(TRIM, 2 * MOST)


class Tidy:
    """Does so again and again, where something goes on for hours: it takes a millisecond or two.

    own: also at the end of this thread's own stretch
    """

    def __init__(self, every: float = EVERY, *, own: bool = False) -> None:
        self.every, self.own = every, own  # seconds
        self._at = time.monotonic()

    def due(self) -> None:
        """Gives back, where that was not done for so long."""
        if time.monotonic() - self._at > self.every:
            self._at = time.monotonic()
            give_back()
            if self.own:
                give_back_own()
