"""Measures how far a paced step exceeds its bound, and how exactly recorded bytes match the formula.

The bound of a step is forward + max(backward, time until the first bucket is full + wire time of all buckets) + update.
Compute is paced and the wire is an emulated Link, so that ranks behave like devices.

    python -m tests.bench.bound --out docs/data/bound.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from workbench import Experiment, Lab
from workbench.engine.collectives.shaping import ComputePace
from workbench.fabric import traffic
from workbench.run import Run
from workbench.tasks import ByteGPT

PACE = {2: 240.0, 4: 600.0}  # ms per step: well above the real compute of the ranks on two cores
BUCKETS = (0.3, 0.7, 1.0, 3.0)
SKIP, STEPS = 3, 9


def settled(run: Run, first: int) -> list[float]:
    """Returns the step times of rank 0 from step `first` on, in seconds."""
    s = run.spans
    s = s[(s.lane == "step") & (s["rank"] == 0) & (s.step >= first)]
    return list(s.t1 - s.t0)


def first_full(run: Run, step: int) -> float:
    """Returns the seconds from the start of backward until the first bucket was full, on rank 0."""
    s = run.spans
    s = s[(s["rank"] == 0) & (s.step == step)]
    backward = s[s.name == "backward"].t0.min()
    return float(s[s.lane == "comm"].t0.min() - backward)


def bound(e: Experiment, nbytes: list[int], full: float) -> float:
    """Returns the shortest possible seconds of a step on this pace and Link."""
    pace = e.pace * 1e-3
    wire = sum(e.fabric.link.seconds(*traffic("all_reduce", n, e.ranks)) for n in nbytes)
    return pace * (ComputePace.shares["forward"] + ComputePace.shares["update"]) + max(
        pace * ComputePace.shares["backward"], full + wire
    )


def measure(lab: Lab, ranks: int, times: float, out: Path) -> list[dict[str, Any]]:
    """Measures all bucket sizes at one wire time (`times` backward), switched live in one run."""
    e = Experiment(task=ByteGPT(), ranks=ranks, eval_every=0, pace=PACE[ranks])
    run = lab.run(e.set("bandwidth", 1e5), out=out / f"{ranks}-{times}-{time.time():.0f}")
    wait(run, 2)
    model = json.loads(run.marks[run.marks.name == "start"].iloc[0].detail)["nbytes"]
    sent, _ = traffic("all_reduce", model, ranks)
    mbit = sent * 8e-6 / (PACE[ranks] * 1e-3 * ComputePace.shares["backward"] * times)
    lab.set("link.bandwidth", mbit).wait(20)
    rows = []
    for size in BUCKETS:
        change = lab.set("bucket_mb", size)
        change.wait(20)
        first = change.applied_at + SKIP
        wait(run, first + STEPS)
        comm = run.spans
        comm = comm[(comm.lane == "comm") & (comm["rank"] == 0) & (comm.step == first)]
        cut = [json.loads(d) for d in run.marks[run.marks.name == "buckets"].detail][-1]["nbytes"]
        formula = sum(traffic("all_reduce", n, ranks)[0] for n in cut)
        low = bound(e.set("bandwidth", mbit), cut, first_full(run, first))
        steps = settled(run, first)[:STEPS]
        rows.append(
            {
                "ranks": ranks,
                "wire": times,
                "bucket_mb": size,
                "bound": low,
                "steps": steps,
                "bytes": int(comm.nbytes.sum()),
                "formula": formula,
                "mbit": mbit,
            }
        )
        print(
            f"{ranks} ranks, wire {times:g} x backward, {size:g} MB: step {statistics.median(steps) * 1e3:.0f} ms, "
            f"bound {low * 1e3:.0f} ms, {statistics.median(steps) / low:.3f}",
            flush=True,
        )
    lab.stop()
    run.wait(20)
    return rows


def wait(run: Run, step: int) -> None:
    """Waits until every rank has finished `step`."""
    while True:
        s = run.timeline.spans.rows()
        done = [int(s.step[(s.rank == r) & (s.lane == "step")].max(initial=-1)) for r in range(run.settings["ranks"])]
        if min(done) >= step:
            return
        if not run.live:
            raise RuntimeError(f"the run ended early: {run}")
        time.sleep(0.1)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    a = ask.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in (2, 4):
        with Lab(ranks=ranks, name=f"bound{ranks}") as lab:
            for times in (0.5, 1.0, 2.0):
                rows += measure(lab, ranks, times, a.runs)
    if a.out:
        a.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
