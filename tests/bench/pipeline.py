"""Compares the bubble of four real stages with (p-1) / (vm+p-1), or (p-1) / (3m+p-1), in alternating blocks.

Compute is paced, so that four ranks on two cores behave like devices. A micro-batch's forward through one of a stage's
v pieces takes 100 ms, its backward 200, or the halves of it 100 each. The delay of each pass beyond that is measured
too.

    python -m tests.bench.pipeline --out docs/data/pipeline.json
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
from workbench import Experiment, Lab
from workbench.partitions import Pipeline
from workbench.run import Run
from workbench.tasks import Task

STAGES, PASS = 4, {"forward": 0.1, "backward": 0.2}  # seconds of one micro-batch on one stage
# Label, schedule, micro-batches and pieces of the model per stage.
KINDS = [("1F1B", "OneFOneB", 8, 1), ("GPipe", "GPipe", 8, 1), ("1F1B", "OneFOneB", 16, 1), ("GPipe", "GPipe", 16, 1),
         ("interleaved 1F1B", "Interleaved", 8, 2), ("interleaved 1F1B", "Interleaved", 16, 2),
         ("ZB-H1", "ZeroBubble", 8, 1), ("ZB-H1", "ZeroBubble", 16, 1), ("1F1B again", "OneFOneB", 8, 1),
         ("1F1B again", "OneFOneB", 16, 1)]  # fmt: skip


def model() -> Any:
    """Eight equal layers."""
    from torch import nn

    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])


def data(rank: int, ranks: int, seed: int) -> Any:
    """Returns one batch of sixteen, over and over."""
    import torch

    return [(torch.ones(16, 32), torch.zeros(16, 32))]


def loss(net: Any, pair: Any) -> Any:
    """Mean squared error."""
    from torch.nn import functional

    return functional.mse_loss(net(pair[0]), pair[1])


def optimizer(params: Any) -> Any:
    """Plain SGD."""
    import torch

    return torch.optim.SGD(params, 0.01)


def pace(micros: int, pieces: int = 1) -> float:
    """Returns a whole model's ms of compute per step at which a micro-batch's forward through one piece takes 100."""
    return 1e3 * PASS["forward"] * micros * STAGES * pieces / 0.3


def block(lab: Lab, run: Run, schedule: str, micros: int, pieces: int) -> dict[str, float]:
    """Runs one step of this kind, after one that does not count."""
    lab.set("pace", pace(micros, pieces))
    lab.set("partition.micros", micros)
    change = lab.set("partition.schedule", schedule)
    change.wait(60)
    step = change.applied_at + 1
    wait(run, step)
    rows = run.timeline.spans.rows()
    rows = rows[(rows.step == step) & rows.equal("lane", "compute")]
    passes = rows[rows.phase("forward") | rows.phase("backward")]
    busy = float((passes.t1 - passes.t0).sum()) / STAGES
    late, halves = [], bool(passes.phase("backward weights").any())
    for phase, seconds in PASS.items():
        mine, seconds = passes[passes.phase(phase)], 0.1 if halves else seconds
        place = np.unique([f"{r} {n}" for r, n in zip(mine.rank, mine.name, strict=True)], return_inverse=True)[1]
        late += (np.bincount(place, mine.t1 - mine.t0) - seconds).tolist()  # an interrupted pass has several rows
    bubble = 1.0 - busy / float(passes.t1.max() - passes.t0.min())
    return {"bubble": bubble, "late": statistics.median(late), "latest": max(late)}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--rounds", type=int, default=9)
    a = ask.parse_args()
    cells: list[dict[str, Any]] = [
        {"name": name, "micros": m, "stages": STAGES, "pieces": v, "blocks": []} for name, _, m, v in KINDS
    ]
    task = Task(model=model, data=data, loss=loss, optimizer=optimizer)
    e = Experiment(task=task, ranks=STAGES, eval_every=0, pace=pace(8), partition=Pipeline(stages=STAGES, micros=8))
    with Lab(ranks=STAGES, name="pipeline") as lab:
        run = lab.run(e, out=a.runs / f"pipeline-{time.time():.0f}")
        wait(run, 1)
        for number in range(a.rounds):
            for cell, (_, schedule, micros, pieces) in zip(cells, KINDS, strict=True):
                cell["blocks"].append(block(lab, run, schedule, micros, pieces))
            middles = [statistics.median(b["bubble"] for b in cell["blocks"]) for cell in cells]
            print(f"round {number + 1}: {', '.join(f'{middle:.3f}' for middle in middles)}", flush=True)
        lab.stop()
        run.wait(60)
    if a.out:
        a.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
