"""Compares ByteScheduler with DDP's order on real ranks, on links 0.5 to 2 times as slow as compute.

Compute is paced and the Link emulated, so four ranks on two cores behave like devices. A step is the time from one
start of forward to the next, because ByteScheduler's exchange overlaps with the next step's forward.

    python -m tests.bench.priorities --out docs/data/priorities.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.bound import wait
from tests.bench.page import interval, table
from tests.bench.words import listed
from workbench import Experiment, Lab, tune
from workbench.fabric import Fabric, Link
from workbench.run import Run
from workbench.sim import Costs
from workbench.strategies import DDP, ByteScheduler, Strategy
from workbench.tasks import ByteGPT

RANKS, PACE, BUCKET = 4, 2000.0, 0.4  # ms of a step's compute; MB
TASK = ByteGPT(layers=6)
WIRES = (0.5, 1.0, 2.0)  # time of the exchange relative to compute
SLICE = 0.2  # MB: P3's 50,000 parameters
FIRST = 8  # steps that calibrate the simulator
STEPS = 4  # of a block; the first two after a switch do not count
WAYS: dict[str, Strategy] = {
    "DDP": DDP(),
    "pieces in DDP's order": ByteScheduler(order="fifo", partition_mb=SLICE, credit_mb=SLICE),
    "P3: a slice at a time": ByteScheduler(partition_mb=SLICE, credit_mb=0.001),
    "ByteScheduler": ByteScheduler(partition_mb=SLICE, credit_mb=2 * SLICE),
    "DDP again": DDP(),
}
TUNED = "ByteScheduler, tuned"  # `tune` in the simulator finds its two sizes, calibrated from the first steps
WITHIN = {"partition_mb": (0.02, 2.0), "credit_mb": (0.02, 4.0)}  # MB
ASKED = 1.15  # of the longer of compute and exchange


def bandwidth(wire: float, nbytes: int) -> float:
    """Returns the Mbit/s at which an all-reduce of so many bytes takes `wire` times as long as compute."""
    return 2 * (RANKS - 1) / RANKS * nbytes * 8e-6 / (wire * PACE * 1e-3)


def tuned(e: Experiment, costs: Costs) -> ByteScheduler:
    """Returns ByteScheduler with the sizes that the simulator finds for an experiment."""
    begun = e.set("strategy", WAYS["ByteScheduler"])
    best = tune(begun, list(WITHIN), within=WITHIN, costs=costs).best.settings
    return ByteScheduler(**{name.removeprefix("strategy."): round(mb, 3) for name, mb in best.items()})


def block(lab: Lab, run: Run, strategy: Strategy) -> float:
    """Returns the mean seconds of a block's step under a strategy, from one start of forward to the next."""
    first = (lab.set("strategy", strategy).wait(60).applied_at or 0) + 2
    wait(run, first + STEPS)
    rows = run.timeline.spans.rows()
    rows = rows[(rows.rank == 0) & rows.equal("lane", "compute") & rows.equal("name", "forward")]
    begins = [float(np.min(rows.t0[rows.step == step])) for step in (first, first + STEPS)]
    return (begins[1] - begins[0]) / STEPS


def section(d: dict[str, Any]) -> str:
    """Returns the page's section, from the raw numbers."""
    rows: list[list[str]] = []
    kept: list[float] = []  # of ByteScheduler, with tuned sizes if there are any
    sizes: list[str] = []
    for cell in d["cells"]:
        longer = max(1.0, cell["wire"]) * PACE * 1e-3
        for way in cell["blocks"]:
            over = [seconds / longer for seconds in cell["blocks"][way]]
            beside = [a / b for a, b in zip(cell["blocks"]["DDP"], cell["blocks"][way], strict=True)]
            rows.append([f"{cell['wire']:g}", way, "{:.3f} ({:.3f} to {:.3f})".format(*interval(over)),
                         "{:.3f} ({:.3f} to {:.3f})".format(*interval(beside))])  # fmt: skip
            if way == (TUNED if "tuned" in cell else "ByteScheduler"):
                kept.append(statistics.median(over))
            if way == TUNED:
                sizes.append("{partition_mb:g} and {credit_mb:g}".format(**cell["tuned"]))
    verdict = "kept" if max(kept) <= ASKED else "NOT kept"
    wires = listed([f"{cell['wire']:g}" for cell in d["cells"]])
    about = (
        f"{RANKS} ranks train ByteGPT of six layers ({d['nbytes'] / 1e6:.1f} MB of gradients) in buckets of {BUCKET:g} "
        f"MB. A step has {PACE:g} ms of paced compute. On the emulated links an all-reduce of the whole model takes "
        f"{wires} times as long as compute. A live run switches the order of messages in alternating blocks of {STEPS} "
        f"steps. The table shows medians of {len(d['cells'][0]['blocks']['DDP'])} rounds with 95 % bootstrap "
        "intervals. The rows"
        ' "DDP again" are the A/A control.\n\n'
        f"- Pieces in DDP's order: a piece has {SLICE:g} MB, and the credit is one piece.\n"
        "- P3: the same pieces, one at a time.\n"
        "- ByteScheduler: the same pieces, and the credit is two pieces.\n"
        f"- ByteScheduler, tuned: piece and credit have {'; '.join(sizes) or '(not measured yet)'} MB. Bayesian"
        " optimisation in the simulator finds both sizes. The first steps of the run calibrate the simulator."
    )
    goal = (
        f"Goal for ByteScheduler, on each link tuned if measured: a step takes at most {ASKED:g} times the longer of"
        f" compute and all-reduce. The worst result is {max(kept):.3f}: {verdict}."
    )
    head = [
        "all-reduce / compute",
        "order",
        "step / longer of compute and all-reduce",
        "DDP's step / step in this order",
    ]
    return f"{about}\n\n{table(head, rows)}\n{goal}\n"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--wires", type=float, nargs="+", default=WIRES, choices=WIRES, help="only these, the others stay")
    a = ask.parse_args()
    nbytes = 4 * sum(parameter.numel() for parameter in TASK.build().model().parameters())
    known = json.loads(a.out.read_text())["cells"] if a.out and a.out.exists() else []
    cells: dict[float, dict[str, Any]] = {cell["wire"]: cell for cell in known}
    with Lab(ranks=RANKS, name="priorities") as lab:
        for wire in a.wires:
            e = Experiment(task=TASK, ranks=RANKS, eval_every=0, pace=PACE, bucket_mb=BUCKET, batch=2,
                           fabric=Fabric(link=Link(bandwidth=bandwidth(wire, nbytes))))  # fmt: skip
            run = lab.run(e.set("strategy", WAYS["ByteScheduler"]), out=a.runs / f"priorities-{time.time():.0f}")
            wait(run, FIRST)
            best = tuned(e, Costs.measured(run))
            ways = {**WAYS, TUNED: best}
            cell = {"wire": wire, "blocks": {way: [] for way in ways},
                    "tuned": {"partition_mb": best.partition_mb, "credit_mb": best.credit_mb}}  # fmt: skip
            for number in range(a.rounds):
                for way, strategy in ways.items():
                    cell["blocks"][way].append(block(lab, run, strategy))
                said = ", ".join(f"{way} {blocks[-1] * 1e3:.0f}" for way, blocks in cell["blocks"].items())
                print(f"wire {wire:g}, round {number + 1}: {said} ms", flush=True)
            lab.stop()
            run.wait(60)
            cells[wire] = cell
    if a.out:
        a.out.write_text(json.dumps({"nbytes": nbytes, "cells": [cells[wire] for wire in sorted(cells)]}))


if __name__ == "__main__":
    main()
