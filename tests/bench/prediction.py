"""Compares predicted with measured paced step times over settings outside the simulator's calibration.

    python -m tests.bench.prediction --out docs/data/prediction.json

One run is recorded for calibration: one Link, one bucket size, each compressor once, only DDP. A second run then
changes to every other setting live. The costs of the first run predict it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.words import Goal
from workbench import analysis, simulate
from workbench.compressors import Cast, Dense, ErrorFeedback, TopK
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.lab import Lab
from workbench.run import Run
from workbench.sim import Costs
from workbench.strategies import DDP, LocalSGD
from workbench.tasks import ByteGPT

PACE = 150.0  # ms: four ranks on two cores can keep it, codecs included
SETTLE = 3  # steps after a change that do not count
STEPS = 20  # counted steps: whole rounds of every strategy here
ASKED, WORST = 0.08, 0.20  # errors, the median and the largest
CODECS = {"dense": Dense(), "bf16": Cast(to="bf16"), "top-k 5 %": ErrorFeedback(of=TopK(density=0.05))}
KNOWN = Experiment(task=ByteGPT(), pace=PACE, eval_every=0, bucket_mb=0.5, fabric=Fabric(link=Link(bandwidth=150)))


def settings() -> Iterator[tuple[str, Experiment]]:
    """Yields the experiments to predict, by name; none is in the calibration run."""
    wires = ((60.0, 0.0), (250.0, 0.5), (1000.0, 2.0))
    for strategy, bucket, (bandwidth, latency), codec in itertools.product(
        (DDP(), LocalSGD(every=4)), (0.25, 1.5), wires, CODECS
    ):
        if isinstance(strategy, LocalSGD) and codec == "bf16":
            continue
        link = Link(bandwidth=bandwidth, latency=latency)
        name = f"{strategy}, {bucket:g} MB, {bandwidth:g} Mbit/s, {latency:g} ms, {codec}"
        fabric = Fabric(link=link)
        yield name, replace(KNOWN, strategy=strategy, bucket_mb=bucket, fabric=fabric, compressor=CODECS[codec])


def stretch(lab: Lab, run: Run, wanted: Experiment) -> tuple[int, int]:
    """Changes the run to `wanted` and lets it train; returns the steps [first, stop) made under it."""
    at = 0
    for path in ("strategy", "compressor", "bucket_mb", "fabric"):
        change = lab.set(path, getattr(wanted, path)).wait(60)
        at = max(at, int(change.applied_at or 0))
    first = at + SETTLE
    while analysis.last_steps(run.timeline)[1] < first + STEPS:
        if not lab.live:
            run.wait(5)
        time.sleep(0.1)
    return first, first + STEPS


def seconds(run: Run, first: int, stop: int) -> float:
    """Returns the mean step over steps and ranks."""
    return float(np.mean(analysis.break_down(run.timeline, first, stop).seconds))


def predicted(wanted: Experiment, costs: Costs) -> float:
    run = simulate(replace(wanted, steps=SETTLE + 1 + STEPS), costs=costs)
    return seconds(run, SETTLE + 1, SETTLE + 1 + STEPS)


def step_errors(found: dict[str, Any]) -> list[float]:
    """Returns the size of each relative error of a step."""
    return [abs(row["predicted"] / row["measured"] - 1) for row in found["rows"]]


def goals(found: dict[str, Any]) -> list[Goal]:
    off = step_errors(found)
    return [Goal("median error", statistics.median(off), ASKED), Goal("worst error", max(off), WORST)]


def section(found: dict[str, Any]) -> str:
    """Returns the section of docs/project/prediction.md on settings changed live, from the raw numbers."""
    rows = found["rows"]
    lines = ["| setting | measured (ms) | predicted (ms) | error |", "| --- | --- | --- | --- |"]
    for r in rows:
        off = r["predicted"] / r["measured"] - 1
        lines.append(f"| {r['setting']} | {r['measured'] * 1e3:.0f} | {r['predicted'] * 1e3:.0f} | {off:+.1%} |")
    table = "\n".join(lines)
    return (
        f"{found['ranks']} real ranks train ByteGPT with {found['pace']:g} ms of paced compute per step. One run "
        "calibrates the simulator: DDP with buckets of 0.5 MB on 150 Mbit/s, with each compressor once. A second run "
        f"changes to each setting live. The measured step is the mean of {found['steps']} steps. The simulation has no "
        "tensor values. A setting shows strategy, bucket size, bandwidth, latency and compressor.\n\n"
        f"{len(rows)} settings: {'; '.join(map(str, goals(found)))}. The raw numbers are in "
        "`docs/data/prediction.json`.\n\n"
        f"{table}\n"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--ranks", type=int, default=4)
    a = ask.parse_args()
    rows: list[dict[str, Any]] = []
    with Lab(ranks=a.ranks, name="prediction") as lab:
        run = lab.run(replace(KNOWN, ranks=a.ranks))
        for compressor in CODECS.values():
            stretch(lab, run, replace(KNOWN, compressor=compressor))
        lab.stop()
        costs = Costs.measured(run.wait(30))
        run = lab.run(replace(KNOWN, ranks=a.ranks))
        for name, wanted in settings():
            measured = seconds(run, *stretch(lab, run, wanted))
            expected = predicted(replace(wanted, ranks=a.ranks), costs)
            rows.append({"setting": name, "measured": measured, "predicted": expected})
            print(f"{name}: {measured * 1e3:.0f} ms, predicted {expected * 1e3:.0f} ms", flush=True)
        lab.stop()
        run.wait(30)
    errors = sorted(abs(r["predicted"] / r["measured"] - 1) for r in rows)
    print(f"{len(rows)} settings: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    if a.out:
        a.out.write_text(json.dumps({"pace": PACE, "ranks": a.ranks, "steps": STEPS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
