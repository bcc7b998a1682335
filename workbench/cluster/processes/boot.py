"""Becomes one of a lab's processes: controller, engine, or the server that forks engines.

Run as a script. Torch is loaded before an engine reports: "up" means ready. A process ends itself if its owner is gone
and the guard has not ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from workbench.cluster.processes.lab_place import LabPlace

GUARD_TIMEOUT = 6.0  # seconds for the guard, before a process ends itself
DESCRIPTORS = 65_536  # per engine: soft limits of 1,024 were made for select()
DESCRIPTOR_LIMITS = (DESCRIPTORS, 10_240, 4_096)  # macOS does not report its limit
NICENESS = 5  # notebook and page share the cores


def main(kind: str, file: str) -> None:
    """Becomes the process `kind`. The remaining arguments are ipyparallel's."""
    find_workbench()
    import psutil  # noqa: F401 (not in the thread: two threads must not import at the same time)

    if kind == "engines":
        from workbench.cluster.processes.fork_server import serve_forks

        return serve_forks(partial(run_engine, Path(file).parent))
    if kind == "engine":
        run_engine(Path(file).parent)
    keep_watch(Path(file).parent)
    os.register_at_fork(after_in_child=follow_parent)
    from ipyparallel.controller.app import main as become

    become()


def run_engine(place: Path) -> NoReturn:
    """Runs as an engine of the lab in `place`."""
    from workbench.cluster.processes.stack_dump import dump_stacks_on_signal

    keep_watch(place)
    dump_stacks_on_signal(place / "log")
    import torch  # noqa: F401
    from ipyparallel.engine.app import main as become

    os.nice(NICENESS)
    raise_descriptor_limit()
    run_and_exit(become)


def keep_watch(place: Path) -> None:
    """Watches the lab's owner on a thread."""
    from workbench.cluster.processes.lab_place import LabPlace

    threading.Thread(target=watch_owner, args=(LabPlace(place),), name="owner watch", daemon=True).start()


def follow_parent() -> None:
    """Ends this fork once its parent, and the parent's threads, are gone."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=look, name="parent watch", daemon=True).start()


def run_and_exit(become: Callable[[], None]) -> NoReturn:
    """Ends the process at once after the engine, whatever its threads do.

    A normal exit would unwind a thread inside torch's C++ frames, which aborts the process (SIGABRT). So exit functions
    run before.
    """
    code: Any = 0
    try:
        become()
    except SystemExit as left:
        code = left.code
    except RuntimeError as error:
        code = 128 + signal.SIGTERM  # tornado raises this for ipyparallel at SIGTERM
        if "Event loop stopped" not in str(error):
            traceback.print_exc()
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def raise_descriptor_limit() -> None:
    """Raises the limit of open files: each process group needs one per peer."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in DESCRIPTOR_LIMITS:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if soft == resource.RLIM_INFINITY or soft >= most:
            return
        with contextlib.suppress(ValueError, OSError):
            return resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def find_workbench() -> None:
    """Imports `workbench` from this file's package."""
    here = str(Path(__file__).resolve().parents[3])
    sys.path.pop(0)
    if here not in sys.path:
        sys.path.insert(0, here)


def watch_owner(place: LabPlace) -> None:
    """Ends this process and its children once the owner is gone. A detached lab has none."""
    import psutil

    from workbench.cluster.processes.lab_place import alive

    alone = 0.0
    while alone < GUARD_TIMEOUT:
        time.sleep(1.0)
        state = place.read_state()
        orphan = not state or (state["owner"] is not None and not alive(state["owner"]))
        alone = alone + 1.0 if orphan else 0.0
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


if __name__ == "__main__":
    kind, file = sys.argv[1:3]
    sys.argv[1:3] = []
    main(kind, file)
