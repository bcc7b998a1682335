"""Measures a lab's processes while it trains, and reads its dashboard like a page."""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.lab import Lab
from workbench.record.timeline import Table, Timeline

EVERY = 10.0  # seconds between two looks
WARM, WINDOW = (
    600.0,
    600.0,
)  # seconds: the window of this length after `WARMUP_PASSES` is compared with the last `WINDOW_LOSSES`

Say = Callable[[str], None]
Look = dict[str, Any]


class Page:
    """Reads a board as a browser's page does: greets, reports that it is open, acknowledges, and reloads."""

    def __init__(self, board: Any, again: float = 300.0) -> None:
        self.board, self.again = board, again
        self.messages = self.nbytes = self.opened = 0
        self.longest = 0  # bytes of one message
        self._drawn: queue.Queue[int] = queue.Queue()
        self._over = threading.Event()
        board.send = self._take
        self._thread = threading.Thread(target=self._live, name="page", daemon=True)
        self._thread.start()

    def _take(self, content: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        size = len(json.dumps(content)) + sum(map(len, buffers))
        self.messages, self.nbytes, self.longest = self.messages + 1, self.nbytes + size, max(self.longest, size)
        self.opened += content["kind"] == "open"
        if "number" in content:
            self._drawn.put(content["number"])

    def _say(self, kind: str, **rest: Any) -> None:
        self.board._receive_message(None, {"page": "soak", "kind": kind, **rest}, [])

    def _live(self) -> None:
        greeted = here = float("-inf")
        while not self._over.is_set():
            now = time.monotonic()
            if now - greeted > self.again:
                self._say("hello")
                greeted = now
            if now - here > 2.0:
                self._say("here")
                here = now
            try:
                self._say("ack", number=self._drawn.get(timeout=0.5))
            except queue.Empty:
                continue

    def close(self) -> None:
        self._over.set()
        self._thread.join(5.0)


# -- what is read


def process(pid: int) -> dict[str, float]:
    """Returns a process's memory in MB (proportional share, and anonymous), descriptors and threads."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, kb = line.split()[:2]
        sizes[name.rstrip(":")] = int(kb) / 1024
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return {"pss": round(sizes["Pss"], 2), "anonymous": round(sizes["Anonymous"], 2),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": threads}  # fmt: skip


class Texts:
    """Counts the bytes of marks' texts in a growing table."""

    def __init__(self) -> None:
        self.seen = self.nbytes = 0

    def of(self, table: Table) -> int:
        new = table.rows(self.seen)
        self.seen += len(new)
        self.nbytes += sum(map(sys.getsizeof, new.detail))
        return self.nbytes


def record(timeline: Timeline, texts: Texts) -> dict[str, float]:
    """Returns the rows of the record in the kernel's memory, and their size in MB."""
    tables = (timeline.spans, timeline.samples, timeline.marks)
    nbytes = sum(len(t) * sum(c.dtype.itemsize for c in t._columns.values()) for t in tables)
    return {"rows": sum(map(len, tables)), "mb": round((nbytes + texts.of(timeline.marks)) / 2**20, 2)}


def late(run: Any) -> float:
    """Returns how many seconds ago the newest step on record ended."""
    spans = run.timeline.spans.rows(max(0, len(run.timeline.spans) - 1000))
    return round(time.time() - run.epoch - float(spans.t1.max()), 1) if len(spans) else 0.0


def disk(path: Path) -> float:
    """Returns the size of a folder in MB."""
    sizes = []
    for where, _, names in os.walk(path):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(where, name)).st_size)
            except FileNotFoundError:
                continue  # an old checkpoint that was just removed
    return round(sum(sizes) / 2**20, 2)


class Looking:
    """Looks at a lab every `EVERY` seconds, on its own thread."""

    def __init__(self, lab: Lab, say: Say) -> None:
        self.lab, self.say = lab, say
        self.looks: list[Look] = []
        self._texts: tuple[Any, Texts] = None, Texts()
        self._began, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._go, name="looking", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        while not self._over.wait(EVERY - (time.monotonic() - self._began) % EVERY):
            try:
                self.looks.append(self._look())
            except Exception:
                self.say(traceback.format_exc())

    def _look(self) -> Look:
        lab, run, engines = self.lab, self.lab.run_now, {}
        assert run is not None and lab._live is not None
        if self._texts[0] is not run:
            self._texts = run, Texts()
        for rank in lab.members:
            try:
                pid = lab.cluster.engines[rank].pid
                engines[f"{rank} {pid}"] = process(pid)
            except (FileNotFoundError, ProcessLookupError, KeyError):
                continue  # killed a moment ago
        return {"t": round(time.monotonic() - self._began, 1), "step": lab._live.step, "late": late(run),
                "kernel": process(os.getpid()), "engines": engines,
                "controller": process(lab.cluster.processes.started["controller"].pid),
                "record": record(run.timeline, self._texts[1]), "disk": disk(run.path or Path())}  # fmt: skip

    def close(self) -> None:
        self._over.set()
        self._thread.join(EVERY)


# -- what grew


def grown(looks: list[Look]) -> dict[str, Any]:
    """Returns for each figure its median in the first and in the last window, and their ratio."""
    end = looks[-1]["t"]
    first = [one for one in looks if WARM <= one["t"] < WARM + WINDOW]
    last = [one for one in looks if one["t"] > end - WINDOW]
    if not first or first[-1]["t"] >= last[0]["t"]:
        return {}
    there = sorted(set.intersection(*(set(one["engines"]) for one in first + last)))
    of: dict[str, Callable[[Look], float]] = {}
    for unit in ("pss", "anonymous", "descriptors", "threads"):
        of |= {f"kernel {unit}": lambda one, unit=unit: one["kernel"][unit],
               f"controller {unit}": lambda one, unit=unit: one["controller"][unit]}  # fmt: skip
        of |= {f"rank {name.split()[0]} {unit}": lambda one, unit=unit, name=name: one["engines"][name][unit]
               for name in there}  # fmt: skip
    for unit in ("pss", "anonymous"):
        of[f"kernel {unit} without the record"] = lambda one, unit=unit: one["kernel"][unit] - one["record"]["mb"]
    of |= {"record": lambda one: one["record"]["mb"], "disk": lambda one: one["disk"]}
    out = {}
    for name, value in of.items():
        before, after = (statistics.median(map(value, part)) for part in (first, last))
        out[name] = [round(before, 2), round(after, 2), round(after / before, 4)]
    return out
