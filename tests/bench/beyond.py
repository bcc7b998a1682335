"""Splits a step under our ZeRO-3 and torch's (`fully_shard`) into common computation and the remainder.

A third session runs with the two of `tests.bench.ddp`. It computes the same batches on a whole model, exchanges nothing
and updates as many parameters as a shard has. Blocks of the three alternate. The test counts processor seconds of all
threads and ranks: on the loopback an exchange is only processor work, and other load of the machine does not count.

    python -m tests.bench.beyond --out docs/data/beyond.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.ddp import BLOCK, Ours, Torchs, fsdp, tasks
from workbench.engine.collectives.wire import LeaveEvent, Wire, connect_store, host_store
from workbench.experiment import Experiment

ROUNDS, ASKED = 8, 1.5  # rounds; the required ratio
CELLS = [("ByteGPT", 2, 1.0), ("ByteGPT", 2, 5.0), ("MLP 8 M", 2, 1.0), ("ByteGPT", 4, 1.0)]


class Alone:
    """The same forwards and backwards on a whole model, and an update of a shard's size."""

    def __init__(self, task: Any, rank: int, size: int) -> None:
        learner, e = task.build(), Experiment(task=task, ranks=size).filled()
        torch.manual_seed(0)
        self.model, self.loss = learner.model(), learner.loss
        numel = sum(p.numel() for p in self.model.parameters())
        self.shard = nn.Parameter(torch.zeros(numel // size))
        self.optimizer = learner.optimizer([self.shard], e.lr)
        self.data = itertools.cycle(learner.data(rank, size, e.batch, 0))
        self.grad = torch.zeros_like(self.shard)

    def block(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.loss(self.model, next(self.data))
            loss.backward()
            self.shard.grad = self.grad
            self.optimizer.step()
            self.model.zero_grad(set_to_none=True)
            float(loss.detach())


def rank_main(rank: int, size: int, where: tuple[str, int], name: str, cap: float, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    store, leaving, task = connect_store(*where, "bench"), LeaveEvent(), tasks()[name]
    wire = Wire(store, rank, size, "torch", leaving)
    meet = Wire(store, rank, size, "meet", leaving)
    e = Experiment(task=task, ranks=size, bucket_mb=cap, eval_every=0).set("strategy", "ZeRO3")
    sides = {"ours": Ours(e, rank, where, Path(out)), "torch": Torchs(task, cap, wire, store, rank, size, fsdp),
             "alone": Alone(task, rank, size)}  # fmt: skip
    rows = []
    for r in range(rounds + 2):
        for side in list(sides)[:: 1 if r % 2 else -1]:
            meet.wait(meet.all_reduce(torch.zeros(1)))
            began = time.process_time()
            sides[side].block(BLOCK)
            used = (time.process_time() - began) / BLOCK
            if r >= 2:
                rows.append((r - 2, side, used))
    Path(out, f"rows-{rank}.json").write_text(json.dumps(rows))
    meet.wait(meet.all_reduce(torch.zeros(1)))
    os._exit(0)


def cell(name: str, size: int, cap: float, rounds: int) -> dict[str, Any]:
    """Returns processor seconds per step of all ranks together, by round and side."""
    kept, *where = host_store()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        rest = (size, tuple(where), name, cap, rounds, out)
        procs = [spawn.Process(target=rank_main, args=(r, *rest)) for r in range(size)]
        for p in procs:
            p.start()
        for p in procs:
            p.join()
        found = [json.loads(Path(out, f"rows-{r}.json").read_text()) for r in range(size)]
    del kept
    rows = [(r, side, sum(each[k][2] for each in found)) for k, (r, side, _) in enumerate(found[0])]
    return {"task": name, "ranks": size, "bucket_mb": cap, "rows": rows}


def shares(rows: list[Any]) -> dict[str, float]:
    """Returns medians over rounds.

    alone: the common computation's share of torch's step
    ratio: torch's step over ours
    bound: the ratio if ours were only the common computation
    beyond: torch's remainder over ours
    """
    by = {(r, side): s for r, side, s in rows}
    each = [(by[r, "ours"], by[r, "torch"], by[r, "alone"]) for r in sorted({r for r, _, _ in rows})]
    found = {
        "alone": [a / t for _, t, a in each], "ratio": [t / o for o, t, _ in each],
        "bound": [t / a for _, t, a in each], "beyond": [(t - a) / (o - a) for o, t, a in each],
    }  # fmt: skip
    return {name: statistics.median(values) for name, values in found.items()}


def section(cells: list[dict[str, Any]]) -> str:
    """Returns the page's section: the common share of a step on both sides, and the limit it sets for the ratio."""
    from tests.bench.page import table

    rows, by = [], dict[str, list[dict[str, float]]]()
    for c in cells:
        found = shares(c["rows"])
        found["needed"] = _needed(found["alone"])
        by.setdefault(c["task"], []).append(found)
        rows.append([f"{c['task']}, {c['ranks']} ranks, {c['bucket_mb']:g} MB", f"{found['alone']:.0%}",
                     f"{found['bound']:.2f}", f"{found['ratio']:.2f}", f"{found['beyond']:.1f}",
                     f"{found['needed']:.1f}"])  # fmt: skip
    head = ["cell", "common compute, of torch's step", "limit of the ratio", "torch / ours", "remainder, torch / ours",
            f"needed for {ASKED:g}"]  # fmt: skip
    about = (
        "Under ZeRO-3 both sides do the same forward, backward and update of a shard. A third session does this "
        f"common compute and exchanges nothing. The three run in alternating blocks of {BLOCK} steps; values are "
        "medians over rounds. Seconds are CPU seconds of all threads and ranks, because an exchange over the loopback "
        "is CPU work. Other work of the machine and waiting hardly count in them. So the ratios differ from those of "
        "the table above. If the common compute is a share c of torch's step, the ratio is at most 1/c: that of an "
        f"exchange without cost. To reach {ASKED:g}, our remainder must be (1 - c) / (1 / {ASKED:g} - c) times smaller "
        "than torch's."
    )
    said = [f"For {task} the common compute is {_range(some, 'alone', '.0%')} of torch's step. Our remainder must be "
            f"{_range(some, 'needed')} times smaller than torch's, and is {_range(some, 'beyond')} times smaller."
            for task, some in by.items()]  # fmt: skip
    return f"{about}\n\n{table(head, rows)}\n{' '.join(said)}\n"


def _range(some: list[dict[str, float]], name: str, how: str = ".1f") -> str:
    low, high = (f"{end([one[name] for one in some]):{how}}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _needed(alone: float) -> float:
    """Returns how many times smaller than torch's our remainder must be to reach the required ratio."""
    return (1 - alone) / (1 / ASKED - alone) if alone < 1 / ASKED else float("inf")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=ROUNDS)
    ask.add_argument("--out", type=Path, required=True)
    a = ask.parse_args()
    cells = json.loads(a.out.read_text()) if a.out.exists() else []  # an interrupted campaign resumes
    done = [(c["task"], c["ranks"], c["bucket_mb"]) for c in cells]
    for one in (c for c in CELLS if c not in done):
        cells.append(cell(*one, a.rounds))
        print(*one, {k: round(v, 3) for k, v in shares(cells[-1]["rows"]).items()}, flush=True)
        a.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
