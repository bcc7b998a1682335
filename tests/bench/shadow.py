"""Tests ShadowSync's claim on real ranks: examples per second while a synchronisation takes 1 to 10 steps.

Compute is paced and the Link emulated. Shadows synchronise during the steps, as often as the link permits. Foreground
forms of the same formulas do so every few steps while all ranks wait. A live run switches between them in alternating
blocks. Then follows ShadowSync with its tables on a server (tests/bench/shadow_tables.py).

    python -m tests.bench.shadow --out docs/data/shadow.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tests.bench import shadow_tables
from tests.bench.bound import wait
from tests.bench.page import interval, table
from workbench import Experiment, Lab
from workbench.fabric import Fabric, Link
from workbench.run import Run
from workbench.strategies import BMUF, EASGD, LocalSGD, ShadowBMUF, ShadowEASGD, ShadowMA, Strategy
from workbench.tasks import ClickThrough

RANKS, PACE, BATCH, EVERY = 4, 60.0, 64, 5  # PACE: ms of a step's compute; EVERY: the paper's FR-5
TASK = ClickThrough(ids=500)
TIMES = (1.0, 3.0, 10.0)  # duration of an all-reduce of the model, in steps
STEPS = 40  # of a block, without the first ten after a switch
WAYS: dict[str, Strategy] = {
    "ShadowMA": ShadowMA(),
    "ShadowBMUF": ShadowBMUF(),
    "ShadowEASGD": ShadowEASGD(),
    "ShadowMA again": ShadowMA(),
    "averaging (LocalSGD)": LocalSGD(every=EVERY),
    "BMUF": BMUF(every=EVERY),
    "EASGD": EASGD(every=EVERY),
}
ASKED = 0.05  # allowed change of a shadow's examples per second from the first to the last of TIMES


def bandwidth(steps: float, nbytes: int) -> float:
    """Returns the Mbit/s with which an all-reduce of so many bytes takes as long as `steps` steps of compute."""
    return 2 * (RANKS - 1) / RANKS * nbytes * 8e-6 / (steps * PACE * 1e-3)


def block(lab: Lab, run: Run, strategy: Strategy) -> tuple[float, float]:
    """Returns the examples per second of all ranks under a strategy, and the first measured step."""
    first = (lab.set("strategy", strategy).wait(120).applied_at or 0) + 10
    wait(run, first + STEPS)
    return shadow_tables.rate(run.timeline, RANKS, BATCH, first, STEPS), first


def gap(run: Run, since: int) -> float:
    """Returns the mean number of steps between two synchronisations of a rank, from the shadows' Samples."""
    samples = run.samples
    gaps = samples[(samples["name"] == "sync gap") & (samples["step"] >= since)]["value"]
    return float(gaps.mean()) if len(gaps) else float(EVERY)


def section(d: dict[str, Any]) -> str:
    """Returns the page's section, from the raw numbers."""
    rows, worst = [], 0.0
    for way in WAYS:
        cells = [cell["blocks"][way] for cell in d["cells"]]
        base = statistics.median(eps for eps, _ in cells[0])
        kept = [[eps / base for eps, _ in blocks] for blocks in cells]
        rows.append([way, f"{base:.0f}", *("{:.3f} ({:.3f} to {:.3f})".format(*interval(k)) for k in kept[1:]),
                     *(f"{statistics.median(g for _, g in blocks):.1f}" for blocks in cells)])  # fmt: skip
        if way.startswith("Shadow"):
            worst = max(worst, *(abs(statistics.median(k) - 1) for k in kept))
    rounds = len(d["cells"][0]["blocks"]["BMUF"])
    about = (
        f"{RANKS} ranks train ClickThrough with {PACE:g} ms of paced compute per step. On each emulated link an "
        f"all-reduce of the whole model takes as long as {shadow_tables.DURATIONS} steps. Shadows synchronise in the "
        f"background, as often as the link permits. The foreground forms synchronise every {EVERY} steps, while all "
        f"ranks wait. A live run switches the method in alternating blocks of {STEPS} steps. The table shows the "
        f"examples per second of all ranks: medians of {rounds} rounds with 95 % bootstrap intervals. "
        f"{shadow_tables.GAP}"
    )
    more = f"\n{shadow_tables.section(d['tables'])}" if "tables" in d else ""
    return f"{about}\n\n{table(shadow_tables.HEAD, rows)}\n{shadow_tables.goal(worst, ASKED)}\n{more}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--rounds", type=int, default=3)
    a = ask.parse_args()
    nbytes = 4 * sum(parameter.numel() for parameter in TASK.build().model().parameters())
    cells: list[dict[str, Any]] = []
    with Lab(ranks=RANKS, name="shadow") as lab:
        for steps in TIMES:
            e = Experiment(task=TASK, ranks=RANKS, eval_every=0, pace=PACE, batch=BATCH,
                           fabric=Fabric(link=Link(bandwidth=bandwidth(steps, nbytes))))  # fmt: skip
            run = lab.run(e, out=a.runs / f"shadow-{time.time():.0f}")
            wait(run, 2)
            cell: dict[str, Any] = {"steps": steps, "blocks": {way: [] for way in WAYS}}
            for number in range(a.rounds):
                for way, strategy in WAYS.items():
                    eps, since = block(lab, run, strategy)
                    cell["blocks"][way].append((eps, gap(run, since)))
                said = ", ".join(f"{way} {b[-1][0]:.0f} (gap {b[-1][1]:.1f})" for way, b in cell["blocks"].items())
                print(f"{steps:g} steps, round {number + 1}: {said}", flush=True)
            lab.stop()
            run.wait(60)
            cells.append(cell)
    tables = shadow_tables.cells(a.runs, a.rounds)
    if a.out:
        a.out.write_text(json.dumps({"cells": cells, "tables": tables}))


if __name__ == "__main__":
    main()
