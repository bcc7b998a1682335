"""Measures ShadowSync on real ranks with tables on a server, while a round takes 1 to 10 steps.

Each block is a separate run, in turn, because the foreground forms (tests/bench/foreground.py) have no live switch.
This is a part of `python -m tests.bench.shadow`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.foreground import ForegroundBMUF, ForegroundEASGD, ForegroundMA
from tests.bench.page import interval, table
from tests.bench.words import listed
from workbench import Experiment, Lab
from workbench.fabric import Fabric, Link
from workbench.record.timeline import Timeline
from workbench.strategies import ShadowSync, ShadowSyncBMUF, ShadowSyncMA, Strategy
from workbench.tasks import ClickThrough

TRAINERS, SERVERS, PACE, BATCH, EVERY, PIECE = 4, 1, 100.0, 8, 5, 1.0  # PIECE: kB on the slowest link
TASK = ClickThrough(fields=2, ids=500, width=4, hidden=256)  # a batch's rows are small next to the other parameters
TIMES = (1.0, 3.0, 10.0)  # duration of an all-reduce of all parameters but the tables, in steps
FIRST, STEPS = 6, 24  # of a block: left out, and measured
ASKED = 0.05
DURATIONS = listed([f"{t:g}" for t in TIMES], "or")
HEAD = ["method", f"examples/s at {TIMES[0]:g} step", *(f"share of it at {t:g} steps" for t in TIMES[1:]),
        f"gap at {TIMES[0]:g} step", *(f"gap at {t:g} steps" for t in TIMES[1:])]  # fmt: skip
GAP = "A gap is the mean number of steps between two synchronisations of a rank."
WAYS: dict[str, Strategy] = {
    "ShadowSyncMA": ShadowSyncMA(),
    "ShadowSyncBMUF": ShadowSyncBMUF(),
    "ShadowSync": ShadowSync(),
    "ShadowSyncMA again": ShadowSyncMA(),
    "averaging, all wait": ForegroundMA(every=EVERY),
    "BMUF, all wait": ForegroundBMUF(every=EVERY),
    "elastic, all wait": ForegroundEASGD(every=EVERY),
}


def replicated(task: ClickThrough) -> int:
    """Returns the bytes of all parameters except the tables."""
    named = task.build().model().named_parameters()
    return 4 * sum(p.numel() for name, p in named if not name.startswith("tables"))


def experiment(strategy: Strategy, steps: float) -> Experiment:
    """Returns a block on a Link where an all-reduce of all parameters but the tables takes `steps` steps."""
    strategy = replace(strategy, piece_kb=PIECE * TIMES[-1] / steps)  # type: ignore[call-arg]  # as long on each wire
    link = Link(bandwidth=2 * (TRAINERS - 1) / TRAINERS * replicated(TASK) * 8e-6 / (steps * PACE * 1e-3))
    return Experiment(task=TASK, ranks=TRAINERS + SERVERS, steps=FIRST + STEPS + 1, strategy=strategy, batch=BATCH,
                      pace=PACE, eval_every=0, fabric=Fabric(link=link))  # fmt: skip


def rate(timeline: Timeline, trainers: int, batch: int, first: int, steps: int) -> float:
    """Returns the examples per second of all trainers, over `steps` steps of each from its step `first` on."""
    rows = timeline.spans.rows()
    rows = rows[rows.equal("lane", "compute") & rows.equal("name", "forward") & (rows.step >= first)]
    begins = [np.sort(rows.t0[rows.rank == rank])[: steps + 1] for rank in range(trainers)]
    return float(sum(batch * (len(t) - 1) / (t[-1] - t[0]) for t in begins))


def cells(runs: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns every way's blocks by duration of a round: examples per second and the mean gap."""
    found: list[dict[str, Any]] = [{"steps": steps, "blocks": {way: [] for way in WAYS}} for steps in TIMES]
    with Lab(ranks=TRAINERS + SERVERS, name="shadow-tables") as lab:
        for number in range(rounds):
            for cell in found:
                for way, strategy in WAYS.items():
                    run = lab.run(experiment(strategy, cell["steps"]), out=runs / f"tables-{time.time():.2f}")
                    run.wait(180)
                    gaps = run.samples[run.samples["name"] == "sync gap"]["value"]
                    eps = rate(run.timeline, TRAINERS, BATCH, FIRST, STEPS)
                    cell["blocks"][way].append((eps, float(gaps[gaps > 0].mean())))
                said = ", ".join(f"{way} {b[-1][0]:.0f} (gap {b[-1][1]:.1f})" for way, b in cell["blocks"].items())
                print(f"tables, {cell['steps']:g} steps, round {number + 1}: {said}", flush=True)
    return found


def section(found: list[dict[str, Any]]) -> str:
    """Returns the page's section, from the raw numbers."""
    rows, worst = [], 0.0
    for way in WAYS:
        cells = [cell["blocks"][way] for cell in found]
        base = statistics.median(eps for eps, _ in cells[0])
        kept = [[eps / base for eps, _ in blocks] for blocks in cells]
        rows.append([way, f"{base:.0f}", *("{:.3f} ({:.3f} to {:.3f})".format(*interval(k)) for k in kept[1:]),
                     *(f"{statistics.median(g for _, g in blocks):.1f}" for blocks in cells)])  # fmt: skip
        if way.startswith("Shadow"):
            worst = max(worst, *(abs(statistics.median(k) - 1) for k in kept))
    about = (
        f"{TRAINERS} trainers train ClickThrough with {PACE:g} ms of paced compute per step. {SERVERS} server has the "
        "embedding tables. On each emulated link an all-reduce of all parameters except the tables takes as long as "
        f"{DURATIONS} steps. Rows of the tables wait behind one message of a shadow. A message has {PIECE:g} kB on the "
        "slowest link, and it takes the same time on each link. The foreground forms make the same round with the "
        f"same tables every {EVERY} steps, while all ranks wait. Each block is a run of {FIRST + STEPS + 1} steps, and "
        f"its last {STEPS} full steps count. The methods take turns. The table shows medians of "
        f"{len(found[0]['blocks']['ShadowSync'])} rounds with 95 % bootstrap intervals."
    )
    return f"### With the tables on a server\n\n{about}\n\n{table(HEAD, rows)}\n{goal(worst, ASKED)}\n"


def goal(worst: float, most: float) -> str:
    """Returns the goal for shadows, the largest change of their examples per second and the verdict."""
    return (
        f"Goal for shadows: the examples per second on the slower links differ by at most {100 * most:.0f} % from "
        f"those on the fastest link. The largest difference is {100 * worst:.1f} %: "
        f"{'kept' if worst <= most else 'NOT kept'}."
    )
