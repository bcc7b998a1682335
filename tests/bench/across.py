"""Steps, bubbles and memory of models across ranks, predicted against measured, one run for each setting.

    python -m tests.bench.across --out docs/data/across.json

The simulator is calibrated from one run under DDP on a Link that no setting has: how late collectives end, and what a
step lasts beside compute and waiting. Compute is paced, so that ranks on few cores behave like devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from workbench import Experiment, Lab, analysis, simulate
from workbench.fabric import Fabric, Link
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline, Tensor
from workbench.partitions.schedules import GPipe, Interleaved, OneFOneB, PipeDream, PipeDream2BW, ZeroBubble
from workbench.run import Run
from workbench.sim import Costs
from workbench.strategies import HSDP, LocalSGD, ZeRO1, ZeRO2, ZeRO3, ZeROInfinity, ZeROOffload
from workbench.tasks import ByteGPT

RANKS, SETTLE, STEPS = 4, 4, 12  # steps that are not counted, and whole rounds of every strategy that are
WHOLE, CUT = 400.0, 1600.0  # ms of a step's compute on a whole model: four ranks on two cores can keep either
KNOWN = Experiment(
    task=ByteGPT(layers=6), ranks=RANKS, steps=SETTLE + STEPS, pace=WHOLE, eval_every=0, batch=8, bucket_mb=1.0,
    optimizer=AdamW(), fabric=Fabric(link=Link(bandwidth=500, latency=0.5), host=0.4),
)  # fmt: skip
LINKS = (Link(bandwidth=150, latency=0.2), Link(bandwidth=1000, latency=2))
SHARDED = {
    "ZeRO1": ZeRO1(), "ZeRO2": ZeRO2(), "ZeRO3": ZeRO3(), "HSDP": HSDP(), "ZeROOffload": ZeROOffload(),
    "ZeROInfinity, host": ZeROInfinity(on="host"),
}  # fmt: skip
CUTS = {
    "naive, 4 stages": Pipeline(stages=4, micros=1),
    "GPipe, 4 stages, m = 8": Pipeline(stages=4, micros=8, schedule=GPipe()),
    "1F1B, 4 stages, m = 8": Pipeline(stages=4, micros=8, schedule=OneFOneB()),
    "1F1B, 2 stages, m = 4": Pipeline(stages=2, micros=4, schedule=OneFOneB()),
    "interleaved, 2 stages, m = 4": Pipeline(stages=2, micros=4, schedule=Interleaved()),
    "ZB-H1, 4 stages, m = 8": Pipeline(stages=4, micros=8, schedule=ZeroBubble()),
    "PipeDream, 4 stages": Pipeline(stages=4, micros=1, schedule=PipeDream()),
    "2BW, 4 stages, m = 4": Pipeline(stages=4, micros=4, schedule=PipeDream2BW()),
    "slices, 2 ways": Tensor(ways=2),
    "slices, 2 ways, sequence": Tensor(ways=2, sequence=True),
    "slices, 4 ways": Tensor(ways=4),
    "1F1B of slices, 2 stages, m = 4": Pipeline(stages=2, micros=4, of=Tensor(ways=2)),
}


def settings() -> Iterator[tuple[str, Experiment]]:
    """What is predicted, by name; nothing of it is in the calibration run."""
    for link in LINKS:
        e = replace(KNOWN, fabric=replace(KNOWN.fabric, link=link))
        wire = f"{link.bandwidth:g} Mbit/s, {link.latency:g} ms"
        for name, strategy in SHARDED.items():
            yield f"{name}, {wire}", replace(e, strategy=strategy)
        for name, partition in CUTS.items():
            yield f"{name}, {wire}", replace(e, partition=partition, pace=CUT)
        between = replace(e, strategy=LocalSGD(every=4), partition=Pipeline(stages=2, micros=4), pace=CUT)
        yield f"LocalSGD between 2 pipelines, {wire}", between


def seen(run: Run) -> dict[str, Any]:
    """Seconds of the mean step, the bubble where there is one, and each rank's peak in bytes."""
    tl, stop = run.timeline, SETTLE + STEPS
    bubble = analysis.bubble(tl, STEPS)
    return {
        "step": float(np.mean(analysis.breakdown(tl, SETTLE, stop).seconds)),
        "bubble": bubble.share if bubble else None,
        "peaks": [m.peak for m in analysis.memory(tl, SETTLE, stop)],
    }


def errors(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By what is predicted, how far off it is by setting; of bubbles the difference, of the others the share.

    A peak is that of the rank that is predicted worst.
    """
    pairs = [(r["measured"], r["predicted"]) for r in rows]
    return {
        "step": [there["step"] / seen["step"] - 1 for seen, there in pairs],
        "bubble": [there["bubble"] - seen["bubble"] for seen, there in pairs if seen["bubble"] is not None],
        "peak": [max((b / a - 1 for a, b in zip(seen["peaks"], there["peaks"], strict=True)), key=abs)
                 for seen, there in pairs],
    }  # fmt: skip


def page(found: dict[str, Any], machine: dict[str, Any]) -> str:
    """The part of docs/prediction.md that is about models across ranks, from the raw numbers."""
    rows, off = found["rows"], errors(found["rows"])
    lines = [
        "| setting | step, measured (ms) | predicted | off by | bubble, measured | predicted | a rank's peak, off by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r, step, peak in zip(rows, off["step"], off["peak"], strict=True):
        a, b = r["measured"], r["predicted"]
        bubble = "| |" if a["bubble"] is None else f"| {a['bubble']:.3f} | {b['bubble']:.3f}"
        times = f"{a['step'] * 1e3:.0f} | {b['step'] * 1e3:.0f} | {step:+.1%}"
        lines.append(f"| {r['setting']} | {times} {bubble} | {peak:+.1%} |")
    table, cuts = "\n".join(lines), [r for r in rows if r["measured"]["bubble"] is not None]
    step, peak, bubble = ([abs(x) for x in off[kind]] for kind in ("step", "peak", "bubble"))
    asked = "asked: at most 5 %" + ("" if statistics.median(step) <= 0.05 else ": NOT kept")
    return (
        f"## Models across ranks\n\nWritten by `python -m tests.bench across` from `docs/data/across.json`. "
        f"{found['ranks']} real ranks, ByteGPT of six layers, a run for each setting; {WHOLE:g} ms of paced compute "
        f"per step where a replica is one rank, {CUT:g} where it is several. The simulator was calibrated from one "
        f"other run: DDP on 500 Mbit/s. Measured: the mean of {found['steps']} steps. A bubble is the share of the "
        f"passes' time for which stages stand still; a peak is the most memory of a rank, of which the one that is "
        f"predicted worst is shown. Sizes only.\n\n"
        f"{len(rows)} settings: steps are off by {statistics.median(step):.1%} in the median ({asked}), by "
        f"{max(step):.1%} at worst; peaks by {statistics.median(peak):.1%} and {max(peak):.1%}; the {len(cuts)} "
        f"bubbles by {statistics.median(bubble):.3f} and {max(bubble):.3f}.\n\n{table}\n\n*{machine.get('date')}; "
        f"{machine.get('cpu')}; {machine.get('system')}; torch {machine.get('torch')}; commit "
        f"{machine.get('commit')}; 15-minute load {machine.get('load', 0):.1f}.*\n"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    a = ask.parse_args()
    rows: list[dict[str, Any]] = []
    with Lab(ranks=RANKS, name="across") as lab:

        def measured(e: Experiment) -> Run:
            return lab.run(e, out=a.runs / f"across-{time.time():.0f}").wait(600)

        costs = Costs.measured(measured(KNOWN))
        for name, e in settings():
            found, expected = seen(measured(e)), seen(simulate(e, costs=costs))
            rows.append({"setting": name, "measured": found, "predicted": expected})
            print(f"{name}: {found['step'] * 1e3:.0f} ms, predicted {expected['step'] * 1e3:.0f}", flush=True)
    for kind, off in errors(rows).items():
        print(f"{kind}: off by {statistics.median(map(abs, off)):.3f} in the median, {max(map(abs, off)):.3f} at worst")
    if a.out:
        a.out.write_text(json.dumps({"ranks": RANKS, "steps": STEPS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
