"""Processes that spin, to keep a machine busy or its cores awake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(1_000_000): pass"  # not longer than its parent


@contextmanager
def spinning(processes: int, nice: int = 0) -> Iterator[None]:
    """Runs `processes` that only spin, their priority lower by `nice`. They end with the block or their parent."""
    code = SPIN.format(parent=os.getpid())
    started = [subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()
