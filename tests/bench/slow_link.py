"""Runs torch's DDP for 800 steps on a link eight times slower than compute, then tries the live controls.

Every setting starts as DDP and changes live at its second step. Time is the sum of rank 0's steps, without evaluations.

    python -m tests.bench.slow_link --out docs/data/slow_link.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench import Experiment, Lab
from workbench.fabric import traffic
from workbench.run import Run
from workbench.strategies import TorchDDP
from workbench.tasks import ByteGPT

RANKS, PACE, STEPS = 4, 30.0, 800
TASK = ByteGPT(layers=1, width=96, context=48)
SETTINGS: dict[str, list[tuple[str, Any]]] = {
    "LocalSGD(every=8)": [("strategy", {"LocalSGD": {"every": 8}})],
    "LocalSGD(every=16)": [("strategy", {"LocalSGD": {"every": 16}})],
    "DDP, top-k 1 %": [("compressor", "TopK"), ("density", 0.01)],
}


def curve(run: Run) -> list[tuple[int, float, float]]:
    """Returns (step, seconds of stepping so far, held-out loss) at every evaluation."""
    s, v = run.timeline.spans.rows(), run.timeline.samples.rows()
    mine = (s.rank == 0) & (s.lane == "step")
    switch = (s.rank == 0) & (s.lane == "switch")
    steps, lasted = s.step[mine], (s.t1 - s.t0)[mine]
    at = v.name == "held_out"
    handed = [(int(k), float(d)) for k, d in zip(s.step[switch], (s.t1 - s.t0)[switch], strict=True)]
    return [
        (int(k), float(lasted[steps < k].sum() + sum(d for q, d in handed if q < k)), float(x))
        for k, x in zip(v.step[at], v.value[at], strict=True)
    ]


def bandwidth() -> float:
    """Returns the Mbit/s at which a dense step's exchange takes eight times its compute."""
    nbytes = 4 * sum(p.numel() for p in TASK.build().model().parameters())
    return traffic("all_reduce", nbytes, RANKS)[0] * 8e-6 / (8 * PACE * 1e-3)


def one(lab: Lab, e: Experiment, turns: list[tuple[str, Any]], out: Path, target: float | None, limit: float) -> Run:
    """Runs `e` with live changes until the held-out loss is `target` or `limit` seconds are over."""
    run = lab.run(e, out=out)
    while run.live and not (run.timeline.spans.rows().step >= 1).any():
        time.sleep(0.05)
    for path, value in turns:
        lab.set(path, value)
    while run.live:
        time.sleep(0.2)
        points = curve(run)
        if target is not None and points and (points[-1][2] <= target or points[-1][1] > limit):
            lab.stop()
            break
    run.wait(60)
    return run


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--steps", type=int, default=STEPS)
    a = ask.parse_args()
    stamp = f"{time.time():.0f}"
    e = Experiment(task=TASK, ranks=RANKS, pace=PACE, eval_every=20, bucket_mb=0.1).set("bandwidth", bandwidth())
    found: dict[str, Any] = {"ranks": RANKS, "pace_ms": PACE, "mbit": bandwidth(), "curves": {}}
    with Lab(ranks=RANKS, name="slow") as lab:
        torchs = replace(e, strategy=TorchDDP(), steps=a.steps)
        base = one(lab, torchs, [], a.runs / f"slow-{stamp}-torch", None, 0)
        found["curves"]["TorchDDP"] = curve(base)
        _, seconds, target = curve(base)[-1]
        print(f"TorchDDP: {target:.3f} after {seconds:.1f} s", flush=True)
        for k, (name, turns) in enumerate(SETTINGS.items()):
            run = one(lab, e, turns, a.runs / f"slow-{stamp}-{k}", target, 0.6 * seconds)
            found["curves"][name] = curve(run)
            hit = [(s, t) for s, t, x in curve(run) if x <= target]
            said = "did not reach it"
            if hit:
                said = f"reached it after {hit[0][1]:.1f} s, {seconds / hit[0][1]:.2f} times as fast"
            print(f"{name}: {said}", flush=True)
            if a.out:
                a.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
