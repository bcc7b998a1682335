"""Runs commands in the background, and ends them with all their child processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = 4  # workers
ROOT = Path(__file__).parents[3]


@contextmanager
def running(command: list[str], folder: Path, **env: str) -> Iterator[None]:
    """Runs `command` with a `*.log` in `folder`, in its own session because Linux shares processors by session."""
    number = len(list(folder.glob("*.log")))
    with (folder / f"{number}.log").open("w") as log:
        own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
        try:
            yield
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    import psutil  # the other systems' processes import this module without psutil

    its = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in psutil.wait_procs(its, timeout=2)[1]:
        one.kill()
