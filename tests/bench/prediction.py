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


def page(found: dict[str, Any], machine: dict[str, Any]) -> str:
    """Returns docs/project/prediction.md from the raw numbers."""
    rows = [{**r, "off": r["predicted"] / r["measured"] - 1} for r in found["rows"]]
    errors = sorted(abs(r["off"]) for r in rows)
    middle, worst = statistics.median(errors), errors[-1]
    lines = ["| setting | measured (ms) | predicted (ms) | off by |", "| --- | --- | --- | --- |"]
    for r in rows:
        lines.append(f"| {r['setting']} | {r['measured'] * 1e3:.0f} | {r['predicted'] * 1e3:.0f} | {r['off']:+.1%} |")
    table = "\n".join(lines)
    kept = [("median", middle, 0.08), ("worst", worst, 0.20)]
    said = {n: f"{v:.1%} (asked: at most {most:.0%}{'' if v <= most else ': NOT kept'})" for n, v, most in kept}
    verdict = "; ".join(f"{name} error {text}" for name, text in said.items())
    return (
        f"# Predicted against measured step time\n\nWritten by `python -m tests.bench prediction` from "
        f"`docs/data/prediction.json`. {found['ranks']} real ranks, ByteGPT, {found['pace']:g} ms of paced compute per "
        f"step. The simulator was calibrated from one other run: DDP, buckets of 0.5 MB, 150 Mbit/s, each compressor "
        f"once. Measured: the mean of {found['steps']} steps, with the setting changed live. Sizes only.\n\n"
        f"{len(rows)} settings: {verdict}.\n\n{table}\n\n*{machine.get('date')}; {machine.get('cpu')}; "
        f"{machine.get('system')}; torch {machine.get('torch')}; commit {machine.get('commit')}; 15-minute load "
        f"{machine.get('load', 0):.1f}.*\n"
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
