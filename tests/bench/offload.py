"""Measures steps whose state does not fit: stages of ZeRO and offload, switched live in blocks of one run.

Compute is paced and the links to host and disk have fixed rates, so that two ranks on two cores behave like devices.
The lab decides which stages fit on a device of so many MB, as for a person.

    python -m tests.bench.offload --out docs/data/offload.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.bound import settled, wait
from workbench import Experiment, KnobError, Lab
from workbench.fabric import Fabric
from workbench.optimizers import AdamW
from workbench.run import Run, require_memory
from workbench.strategies import DDP, Strategy, ZeRO2, ZeRO3, ZeROInfinity, ZeROOffload
from workbench.tasks import ByteGPT

RANKS, PACE = 2, 240.0  # ms of a step's compute
FABRIC = Fabric(host=0.2, disk=0.1)  # GB/s: the model's 7.8 MB take 39 ms one way, to disk 78
STAGES: list[tuple[str, Strategy]] = [
    ("DDP", DDP()), ("ZeRO2", ZeRO2()), ("ZeRO3", ZeRO3()), ("ZeROOffload", ZeROOffload()),
    ("ZeROOffload, delayed", ZeROOffload(delayed=True, delay_from=0)), ("ZeROInfinity, host", ZeROInfinity(on="host")),
    ("ZeROInfinity, disk", ZeROInfinity()), ("ZeROInfinity, disk, prefetch 4", ZeROInfinity(prefetch=4)),
    ("DDP again", DDP()),
]  # fmt: skip
STEPS = 6  # of a block; the first two after a switch do not count


def admitted(e: Experiment) -> float:
    """Returns the smallest memory in MB that the lab accepts for `e`, by bisection within 1 %."""
    low, high = 1.0, 64.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        try:
            require_memory(replace(e, memory_mb=middle))
            high = middle
        except KnobError:
            low = middle
    return high


def block(lab: Lab, run: Run, strategy: Strategy) -> dict[str, Any]:
    """Runs some steps under a strategy: their median, and the memory by place."""
    step = (lab.set("strategy", strategy).wait(60).applied_at or 0) + 2
    wait(run, step + STEPS)
    found = run.memory(STEPS)[0]
    spans = run.timeline.spans.rows()
    spans = spans[(spans.rank == 0) & spans.equal("lane", "offload")]
    moved = int(spans.nbytes[(spans.step >= step) & (spans.step < step + STEPS)].sum()) // STEPS
    places = {where: found.most.get(f"on {where}", 0) for where in ("host", "disk")}
    return {"step": statistics.median(settled(run, step)[:STEPS]), "peak": found.peak, "moved": moved, **places}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--rounds", type=int, default=9)
    a = ask.parse_args()
    e = Experiment(task=ByteGPT(layers=6), ranks=RANKS, eval_every=0, pace=PACE, optimizer=AdamW(), bucket_mb=0.8,
                   batch=2, fabric=FABRIC)  # fmt: skip
    cells: list[dict[str, Any]] = [
        {"name": name, "needs": admitted(replace(e, strategy=strategy)), "blocks": []} for name, strategy in STAGES
    ]
    with Lab(ranks=RANKS, name="offload") as lab:
        run = lab.run(e, out=a.runs / f"offload-{time.time():.0f}")
        wait(run, 2)
        for number in range(a.rounds):
            for cell, (_, strategy) in zip(cells, STAGES, strict=True):
                cell["blocks"].append(block(lab, run, strategy))
            middles = [statistics.median(b["step"] for b in cell["blocks"]) * 1e3 for cell in cells]
            print(f"round {number + 1}: {', '.join(f'{middle:.0f}' for middle in middles)} ms", flush=True)
        lab.stop()
        run.wait(60)
    if a.out:
        a.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
