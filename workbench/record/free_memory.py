"""Returns memory that allocators keep after use to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pyarrow as pa

RANK_INTERVAL = 30.0  # seconds, for ranks
READER_INTERVAL = 5.0  # seconds, for readers: a view's temporary memory grows with the record
TRIM, MMAP = -1, -3  # mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
MMAP_THRESHOLD = 32 << 20  # bytes: glibc's own limit of the second; the first's is twice that


def release_free_memory() -> None:
    """Gives all free memory back. It can exceed the record itself."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def release_thread_memory() -> None:
    """Gives back the free memory at the end of this thread's arena.

    Except in the first thread, malloc_trim keeps it (glibc 2.36): tens of MB per thread after one large use. A free
    with a low threshold returns it. The thresholds end at glibc's maxima.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        get, free = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc)), libc.free
        libc.mallopt(TRIM, 1 << 18)
        free(ctypes.c_void_p(get(100_000)))  # above 64 kB, so that free trims
        libc.mallopt(MMAP, MMAP_THRESHOLD)
        libc.mallopt(TRIM, 2 * MMAP_THRESHOLD)


class MemoryRelease:
    """Gives memory back regularly. Takes 1 to 2 ms.

    own: also at the end of this thread's arena
    """

    def __init__(self, every: float = RANK_INTERVAL, *, own: bool = False) -> None:
        self.every, self.own = every, own  # seconds
        self._at = time.monotonic()

    def due(self) -> None:
        if time.monotonic() - self._at > self.every:
            self._at = time.monotonic()
            release_free_memory()
            if self.own:
                release_thread_memory()
