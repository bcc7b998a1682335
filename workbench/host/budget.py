"""The memory that a rank's device has, where the experiment says so; who needs more is told how much, and for what."""

from __future__ import annotations

from collections.abc import Mapping

MB = 1e6


class OutOfMemory(RuntimeError):
    """A rank needs more memory on its device than `memory_mb` says that there is."""


def require_fits(rank: int, limit_mb: float, needed: int, of: Mapping[str, int], when: str) -> None:
    """Raises OutOfMemory if `needed` bytes are more than there are; limit_mb: 0 is no limit; of: bytes by category."""
    if not limit_mb or needed <= limit_mb * MB:
        return
    parts = ", ".join(f"{name} {_mb(nbytes)}" for name, nbytes in of.items() if nbytes >= 0.005 * needed)
    raise OutOfMemory(
        f"memory_mb={limit_mb:g}: rank {rank} needs {_mb(needed)} MB {when} ({parts}); take a strategy that shares out "
        f"or offloads more (ZeRO3, ZeROInfinity), a smaller batch or bucket_mb, or memory_mb={_mb(1.05 * needed)}"
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / MB:.3g}"
