"""Shows the stacks of this process's threads, even if one thread blocks the process.

An engine answers on the thread of its RPC socket, or else `faulthandler` answers a signal from C. See
`engines/rank_stacks.py` for the kernel's side.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

DUMP_SIGNAL = getattr(signal, "SIGUSR2", None)  # not on Windows


def format_stacks() -> str:
    """Returns this process's stacks except the caller's, newest call last."""
    frames, me = sys._current_frames(), threading.get_ident()
    threads = sorted((t for t in threading.enumerate() if t.ident != me), key=lambda t: not t.name.endswith("training"))
    found = []
    for thread in threads:
        if (frame := frames.get(thread.ident or 0)) is not None:
            found.append(f'thread "{thread.name}"\n' + "".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(found)


def dump_stacks_on_signal(folder: Path) -> None:
    """Makes a signal write this process's stacks into a file of `folder`."""
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, open(make_stacks_path(folder, os.getpid()), "ab"), all_threads=True)


def make_stacks_path(folder: Path, pid: int) -> Path:
    """Returns the file into which a process writes its stacks at a signal."""
    return folder / f"stacks-{pid}.log"
