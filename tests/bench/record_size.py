"""Measures the size of a million spans on disk, the time to load them, and the cost of recording.

    python -m tests.bench.record_size [--rows N] [--out docs/data/record.json]
    python -m tests.bench.record_size --checksums [--out docs/data/checksums.json]

Prints one JSON object. The rows are those of eight ranks, written by the Recorder's own Writer in batches of one
second. Times keep all digits of a real clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit import synthetic
from workbench.engine.record.recorder import Recorder
from workbench.record.store import Writer
from workbench.record.timeline import Rows
from workbench.run import Run

RANKS = 8


def rows_like_an_engines(n: int) -> Rows:
    """Returns about `n` spans of `RANKS` ranks; clock readings of different ranks and threads share no digits."""
    steps = max(n // (RANKS * 20), 2)
    rows = synthetic.timeline(ranks=RANKS, steps=min(steps, 2000)).spans.rows()
    repeats = -(-n // len(rows))
    rng, columns, length = np.random.default_rng(0), rows.columns, float(rows.t1.max()) + 1
    out: dict[str, Any] = {k: np.tile(v, repeats)[:n] for k, v in columns.items()}
    late = np.repeat(np.arange(repeats) * length, len(rows))[:n]
    out["step"] = out["step"] + np.repeat(np.arange(repeats) * steps, len(rows))[:n]
    noise = np.sort(rng.random((3, n)) * 2e-5, axis=0)
    for k, column in enumerate(("asked", "t0", "t1")):
        out[column] = out[column] + late + noise[k]
    return Rows(out)


def written(path: Path, rows: Rows) -> list[int]:
    """Writes each rank's rows in batches of 150 to 400; returns the sizes of the files."""
    rng = np.random.default_rng(1)
    for rank in range(RANKS):
        mine, i = rows[rows.rank == rank], 0
        writer = Writer(path, "spans", rank)
        while i < len(mine):
            n = int(rng.integers(150, 400))
            writer.append(mine[i : i + n].columns)
            i += n
        writer.close()
    return [file.stat().st_size for file in path.glob("*.arrow")]


def cost_of_recording(path: Path, per_second: int = 500, seconds: float = 5.0) -> dict[str, float]:
    """Returns the CPU time of the recorder's thread at a steady rate, and of one call."""
    r = Recorder(0, path, lambda new: None)
    began, calls = time.perf_counter(), 0.0
    for tick in range(int(seconds * 20)):
        t = time.thread_time()
        for i in range(per_second // 20):
            r.span(tick, "comm", "all_reduce bucket 0", tick * 0.05, tick * 0.05 + 1e-4, tick * 0.05 + 2e-4, i)
        calls += time.thread_time() - t
        time.sleep(max(began + (tick + 1) * 0.05 - time.perf_counter(), 0))
    wall = time.perf_counter() - began
    r.close()
    return {
        "rows_per_second": per_second,
        "thread_cpu_share": r.cpu_seconds / wall,
        "us_per_call": calls / (seconds * per_second) * 1e6,
    }


class PlainWriter(Writer):
    """Writes batches without checksums, as earlier versions did."""

    def append(self, columns: Mapping[str, Any]) -> None:
        self._stream.write_batch(self._batch(columns))
        self._flush()


def cost_of_checksums(path: Path, rounds: int = 400) -> dict[str, float]:
    """Returns the CPU time of writing a batch with and without checksums, in turns so that both meet the same load.

    A batch is one second of a rank that steps 25 times a second. The medians are microseconds.
    """
    rows = rows_like_an_engines(20_000)
    mine = rows[rows.rank == 0]
    size = min(500, len(mine) // 2)
    path.mkdir()
    writers = {"with": Writer(path, "spans", 0), "without": PlainWriter(path, "spans", 1)}
    spent: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(rounds):
        at = number * size % (len(mine) - size)
        batch = mine[at : at + size].columns
        for name in sorted(writers, reverse=bool(number % 2)):
            began = time.thread_time()
            writers[name].append(batch)
            spent[name].append(time.thread_time() - began)
    for writer in writers.values():
        writer.close()
    medians = {name: statistics.median(times) * 1e6 for name, times in spent.items()}
    cost = statistics.median(a - b for a, b in zip(spent["with"], spent["without"], strict=True)) * 1e6
    return {"rows": size, "rounds": rounds, "with_us": medians["with"], "without_us": medians["without"],
            "cost_us": cost, "ratio": medians["with"] / medians["without"], "load": os.getloadavg()[0]}  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rows", type=int, default=1_000_000)
    ask.add_argument("--checksums", action="store_true", help="measure what checksums cost, and nothing else")
    ask.add_argument("--out", type=Path)
    said = ask.parse_args()
    if said.checksums:
        with tempfile.TemporaryDirectory() as place:
            give(cost_of_checksums(Path(place) / "record"), said.out)
        return
    n = said.rows
    with tempfile.TemporaryDirectory() as place:
        path = Run({"ranks": RANKS}).save(Path(place) / "run")
        size = sum(written(path, rows_like_an_engines(n)))
        loads = []
        for _ in range(3):
            began = time.perf_counter()
            run = Run.open(path)
            loads.append(time.perf_counter() - began)
        began = time.perf_counter()
        frame = run.spans
        seconds = time.perf_counter() - began
        recording = cost_of_recording(Path(place) / "cost")
    give({"spans": len(frame), "bytes_per_span": size / n, "load_s": loads, "frame_s": seconds, **recording}, said.out)


def give(answer: dict[str, Any], out: Path | None) -> None:
    """Prints the figures and, with `out`, writes them into that file."""
    text = json.dumps({k: np.round(v, 4).tolist() for k, v in answer.items()}, indent=1)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
