"""Finds a script's present line, and the torch.distributed collective in which it waits."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

WORKBENCH_FOLDER = str(Path(__file__).parents[2])
STDLIB_FOLDER = sysconfig.get_paths()["stdlib"]  # site-packages are inside it, or have their name in the path
COLLECTIVES_FILE = str(Path("torch", "distributed", "distributed_c10d.py"))


class ScriptLine(NamedTuple):
    """collective: in which the script waits there; empty if in none"""

    file: str
    line: int
    collective: str

    def __str__(self) -> str:
        return f"{self.collective or 'the script'} at {Path(self.file).name}:{self.line}"


def locate_script(thread: int | None) -> ScriptLine | None:
    """Returns the script's line on this thread; None if the thread runs other code, such as a wait of ours."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    collective = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(WORKBENCH_FOLDER):
            return None
        if file.endswith(COLLECTIVES_FILE):
            collective = frame.f_code.co_name
        elif not file.startswith(STDLIB_FOLDER) and "site-packages" not in file and not file.startswith("<frozen"):
            return ScriptLine(file, frame.f_lineno, collective)
        frame = frame.f_back
    return None
