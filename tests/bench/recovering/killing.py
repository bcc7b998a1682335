"""Kills one worker at a random moment and reads what the other workers then wrote."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.recovering.starting import SIZE

LIMIT = 120.0  # seconds after which a kill counts as not survived
START = 300.0  # seconds that four workers may take until they train
LOOK = 0.3  # seconds between two reads of the files: reading takes time from the workers
RANDOMLY = (1.0, 3.0)  # seconds that all four train before a kill


class Row(NamedTuple):
    """An event of one process at time `t`: "made" a step in a group of `size`, or "failed"."""

    t: float
    word: str
    step: int
    size: int
    pid: int


class Steps(NamedTuple):
    """A step that all members of a group have made, at the time when the last one ended it."""

    t: float
    step: int
    pids: frozenset[int]


def rows(folder: Path) -> list[Row]:
    """Returns the complete rows that the processes have written so far, in order."""
    found = []
    for file in folder.iterdir():
        if file.name.isdigit():
            lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [Row(float(t), word, int(step), int(size), int(file.name)) for t, word, step, size in lines]
    return sorted(found)


def whole(found: list[Row]) -> list[Steps]:
    """Returns the steps that all members of their group have made, in order."""
    out, by = [], dict[tuple[int, int], set[int]]()
    for row in found:
        if row.word == "made":
            pids = by.setdefault((row.step, row.size), set())
            pids.add(row.pid)
            if len(pids) == row.size:
                out.append(Steps(row.t, row.step, frozenset(pids)))
                del by[row.step, row.size]
    return out


def measured(found: list[Row], began: float, victim: int) -> dict[str, Any]:
    """Returns the seconds from a kill at `began`, and the number of repeated steps; None means not yet.

    The seconds last until noticed, until a step of a new group, and until a full group.
    """
    reached = max(row.step for row in found if row.word == "made" and row.pid == victim)
    after = [row for row in found if row.t > began and row.pid != victim]
    steps = whole(after)
    failed = [row.t - began for row in after if row.word == "failed"]
    on, full = steps[0] if steps else None, next((s for s in steps if len(s.pids) == SIZE), None)
    if on:  # if a worker dies between two steps, no step fails
        failed.append(on.t - began)
    return {"noticed": min(failed, default=None), "on": on and on.t - began, "full": full and full.t - began,
            "again": on and max(0, reached - on.step + 1)}  # fmt: skip


def waited(condition: Callable[[], Any], seconds: float) -> bool:
    """Waits until `condition()` holds; returns False after `seconds`."""
    end = time.monotonic() + seconds
    while not (true := bool(condition())) and time.monotonic() < end:
        time.sleep(LOOK)
    return true


def kill(folder: Path, rng: random.Random) -> dict[str, Any]:
    """Kills one of four training workers, and waits until four train again."""

    def members() -> frozenset[int]:
        steps = whole(rows(folder))
        last = steps[-1] if steps else None
        return last.pids if last and len(last.pids) == SIZE and last.t > time.time() - 3.0 else frozenset()

    if not waited(members, START):
        return {"never": "four did not train together"}
    time.sleep(rng.uniform(*RANDOMLY))
    if not (those := members()):
        return {"never": "they stopped by themselves"}
    victim, began = rng.choice(sorted(those)), time.time()
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return {"never": "one of them ended by itself"}
    waited(lambda: measured(rows(folder), began, victim)["full"], LIMIT)
    return {**measured(rows(folder), began, victim), "load": os.getloadavg()[0]}


def middle(values: list[float], digits: int) -> str:
    """Returns the median and the worst value; "" if there are none."""
    return f"{statistics.median(values):.{digits}f}, {max(values):.{digits}f}" if values else ""
