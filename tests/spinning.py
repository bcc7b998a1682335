"""Processes that never rest: a machine that others keep busy, or whose cores are not to fall asleep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spinning(processes: int, nice: int = 0) -> Iterator[None]:
    """`processes` that only spin, their priority lower by `nice`, for as long as this lasts; ended by their handles."""
    command = ["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()
