"""Explains why a process ended: too little memory, or too little room in /dev/shm.

The system only counts such ends, per memory cgroup (version 1 and 2) and machine. A count that rose at a kill gives the
reason.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
MACHINE_COUNTS = "/proc/vmstat"
MEMORY_REMEDY = "take a smaller batch or model, set memory_mb to refuse settings that do not fit, or add memory"
NO_LIMIT = 1 << 60  # bytes: version 1's "no limit"

Read = Callable[[str], str]  # a file's text; raises OSError


def read_text(path: str) -> str:
    """Returns a file's text; raises OSError."""
    return Path(path).read_text(errors="replace")


class ResourceShortage:
    """The system's counts for some processes when read."""

    def __init__(self, read: Read = read_text, room: Callable[[str], os.statvfs_result] | None = None) -> None:
        self.read = read
        self._room = room or getattr(os, "statvfs", None)
        self._before: dict[int, dict[str, int]] = {}

    def read_counts(self, pids: Iterable[int]) -> None:
        self._before = {pid: self._counts(pid) for pid in pids}

    def words(self, pid: int, code: int | None = None) -> str:
        """Names the shortage behind an end with `code` (None: unknown), or ""."""
        if code == -signal.SIGBUS:
            return self._shared_memory()
        if code is not None and code != -signal.SIGKILL:
            return ""
        before = self._before.get(pid, {})
        risen = [file for file, count in before.items() if self._count(file) > count]
        own = next((file for file in risen if file != MACHINE_COUNTS), "")
        if own:
            return f"the system ended it for lack of memory{self._limit(own)}; {MEMORY_REMEDY}"
        if risen:
            said = "the system has just ended a process of this machine for lack of memory, most likely this one"
            return f"{said}; {MEMORY_REMEDY}"
        return ""

    def _counts(self, pid: int) -> dict[str, int]:
        found = {file: self._count(file) for file in [*self._files(pid), MACHINE_COUNTS]}
        return {file: count for file, count in found.items() if count >= 0}

    def _files(self, pid: int) -> list[str]:
        """Returns the count files of a process's memory cgroup and of the top one, which a container may show alone."""
        try:
            lines = self.read(f"/proc/{pid}/cgroup").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            _, _, rest = line.partition(":")
            which, _, path = rest.partition(":")
            if "memory" in which.split(","):
                found += [f"{CGROUPS}/memory{at}/memory.oom_control" for at in (path.rstrip("/"), "")]
            elif not which:
                tops = (CGROUPS, f"{CGROUPS}/unified")
                found += [f"{top}{at}/memory.events" for top in tops for at in (path.rstrip("/"), "")]
        return list(dict.fromkeys(found))

    def _count(self, file: str) -> int:
        """Returns a file's count of ends for lack of memory, or -1."""
        try:
            words = [line.split() for line in self.read(file).splitlines()]
            return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), -1)
        except (OSError, ValueError):
            return -1

    def _limit(self, file: str) -> str:
        name = "memory.max" if file.endswith("events") else "memory.limit_in_bytes"
        try:
            limit = int(self.read(f"{os.path.dirname(file)}/{name}"))
        except (OSError, ValueError):
            return ""
        return f" (its cgroup may have {limit / 1e6:.0f} MB)" if limit < NO_LIMIT else ""

    def _shared_memory(self) -> str:
        said = "it wrote to shared memory or a mapped file for which there was no room"
        try:
            found = self._room("/dev/shm") if self._room else None  # noqa: S108 (it is asked for its size)
        except OSError:
            found = None
        if found is None:
            return said
        whole, free = (n * found.f_frsize / 1e6 for n in (found.f_blocks, found.f_bavail))
        return (
            f"{said} (/dev/shm has {whole:.1f} MB, {free:.1f} free); enlarge it, or set num_workers=0 in data loaders"
        )
