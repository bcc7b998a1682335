"""Opens a lab, runs and closes it, many times, and counts what remains in the kernel's process and on the machine.

    python -m tests.cycles --cycles 100 --out docs/data/cycles.json

A cycle is one `Lab()`, one run and one `close()`. The variants of `VARIANTS` take turns: each has another strategy and
another end. The first cycle of a call warms up and does not count, because libraries start threads that stay. After
every other cycle, descriptors, threads, processes, files and names in /dev/shm are compared with what the warm-up left.

The file keeps every cycle. A later call goes on after the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until
from workbench import Digits, Experiment, Lab
from workbench.lab import RankError

RANKS, STEPS = 2, 6
SETTLE = 5.0  # seconds in which a thread must notice that its lab is closed
LIMIT = 120.0  # seconds for one part of a cycle; a hang takes longer, a busy machine does not
SHM = Path("/dev/shm")


def end_by_itself(lab: Lab) -> None:
    """The run makes its steps, and the lab closes."""
    assert lab.run_now is not None
    lab.run_now.wait(LIMIT)


def end_stopped(lab: Lab) -> None:
    """Somebody stops the run."""
    lab.stop()
    assert lab.run_now is not None
    lab.run_now.wait(LIMIT)


def end_killed(lab: Lab) -> None:
    """A rank dies, and the run fails."""
    lab.kill(1)
    assert lab.run_now is not None
    with suppress(RankError):
        lab.run_now.wait(LIMIT)


def end_closed(lab: Lab) -> None:
    """The lab closes in the middle of the run."""


def end_preempted(lab: Lab) -> None:
    """A rank leaves, and the other goes on until the lab closes."""
    lab.preempt(1)
    assert until(lambda: lab.members == (0,), LIMIT), lab.notes


VARIANTS: list[tuple[str, dict[str, Any], Callable[[Lab], None]]] = [
    ("DDP", {"steps": STEPS}, end_by_itself),
    ("Hogwild", {}, end_stopped),
    ("ZeRO3", {}, end_closed),
    ("LocalSGD", {"compressor": "TopK"}, end_killed),
    ("TorchDDP", {}, end_closed),
    ("DDP", {"on_death": "go on"}, end_preempted),
]


def cycle(number: int, where: Path) -> set[psutil.Process]:
    """One lab, one run, one close. Returns the processes that the lab had."""
    strategy, more, end = VARIANTS[number % len(VARIANTS)]
    lab = Lab(ranks=RANKS, name=f"cycle-{number}")
    try:
        settings = {"task": Digits(hidden=16), "ranks": RANKS, "eval_every": 3, "pace": 5.0, "strategy": strategy}
        run = lab.run(Experiment(**{**settings, **more}), out=where / f"run-{number}")
        assert until(lambda: run.made >= 3 or not run.live, LIMIT), lab.notes
        found = set(psutil.Process().children(recursive=True))
        end(lab)
    finally:
        lab.close()
    return found


def count(folders: list[Path], had: set[psutil.Process]) -> dict[str, Counter[str]]:
    """Counts what this process and its labs' processes have now. folders: where to count files"""
    links = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            links[target.split("[")[0] if target.startswith(("socket:", "pipe:")) else target] += 1
    names = Counter(thread.name.rstrip("0123456789") for thread in threading.enumerate())
    there = had | set(psutil.Process().children(recursive=True))
    alive = Counter(describe(one) for one in there if one.is_running())  # a reused pid is another process
    files = Counter(str(file) for folder in folders for file in folder.rglob("*") if not file.is_dir())
    pids = {os.getpid(), *(one.pid for one in had)}
    shared = Counter(f.name for f in SHM.glob("*") if any(str(p) in f.name for p in pids))
    return {"descriptors": links, "threads": names, "processes": alive, "files": files, "shared memory": shared}


def describe(process: psutil.Process) -> str:
    """Returns a process's pid and its command, or its state if it has no command left."""
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[-120:] or process.status()}"
    return str(process.pid)


def grown(before: dict[str, Counter[str]], now: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """Returns what is in `now` and not in `before`, by kind, without kinds that have not grown."""
    found = {kind: dict(now[kind] - before[kind]) for kind in now}
    return {kind: more for kind, more in found.items() if more}


def go_on(cycles: int, out: Path) -> list[dict[str, Any]]:
    """Plays the cycles that `out` lacks and writes each into it. Returns all cycles."""
    kept = json.loads(out.read_text()) if out.exists() else {"ranks": RANKS, "cycles": []}
    rows = kept["cycles"]
    with tempfile.TemporaryDirectory(prefix="cycles-") as top:
        folders = [Path(top) / name for name in ("runtime", "data", "tmp")]
        for folder, name in zip(folders, ("WORKBENCH_RUNTIME_DIR", "XDG_DATA_HOME", "TMPDIR"), strict=True):
            folder.mkdir(mode=0o700)
            os.environ[name] = str(folder)
        tempfile.tempdir = str(folders[-1])
        runs = Path(top) / "runs"
        had = cycle(0, runs / "warm-up")
        before = count(folders, had)

        def growth() -> dict[str, dict[str, int]]:
            return grown(before, count(folders, had))

        while len(rows) < cycles:
            began = time.monotonic()
            had.update(cycle(len(rows), runs))
            until(lambda: not growth(), SETTLE)
            left = growth()
            strategy, _, end = VARIANTS[len(rows) % len(VARIANTS)]
            rows.append({"cycle": len(rows), "strategy": strategy, "end": (end.__doc__ or "").strip(),
                         "seconds": round(time.monotonic() - began, 1), "left": left})  # fmt: skip
            out.write_text(json.dumps(kept, indent=1) + "\n")
            print(f"cycle {len(rows) - 1}: {strategy}, {rows[-1]['seconds']} s, left {left or 'nothing'}", flush=True)
    return rows


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--cycles", type=int, default=100)
    ask.add_argument("--out", type=Path, required=True)
    a = ask.parse_args()
    rows = go_on(a.cycles, a.out)
    sys.exit(any(row["left"] for row in rows))


if __name__ == "__main__":
    main()
