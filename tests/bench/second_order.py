"""Measures steps to a loss under KFAC, Newton and SGD with momentum, tuned alike, and the cost of a step.

The simulator with real tensors counts the steps, independent of the machine's load. Two settings of each method are
tuned, by the worse of two seeds, from a window of three by three. While the best has an untried neighbour, also
diagonal, the neighbours are tried. No run is longer than the best so far: a later result is worse and needs no second
seed. The best then runs with new seeds. Seconds come from real processes that hold one session of each method and
alternate, bytes from sizes alone. Results stay, so a campaign resumes.

    python -m tests.bench.second_order --out docs/data/second_order.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench import Experiment, simulate
from workbench.engine.collectives.wire import LeaveEvent, Wire, connect_store, host_store
from workbench.engine.rank.session import Session
from workbench.optimizers import SGD
from workbench.strategies import DDP, KFAC, Newton
from workbench.tasks import ByteGPT, Digits

RANKS, TUNING, SEEDS = 4, (0, 1), (2, 3, 4)  # of the simulations that count steps
PROCESSES, ROUNDS, BLOCK = 2, 12, 10  # for seconds: ranks, alternations, steps in each
PERIOD = 20  # steps over which bytes are counted: two of KFAC's periods


class Goal(NamedTuple):
    """A task, the target held-out loss, the most steps and the steps between evaluations."""

    task: Any
    loss: float
    steps: int
    every: int


class Method(NamedTuple):
    """Two ladders of settings, the first for the learning rate, and the start of the first window.

    share: of a goal's steps, for a method with much longer steps
    """

    ladders: tuple[tuple[float, ...], tuple[float, ...]]
    begin: tuple[int, int]
    tuned: str
    share: float = 1.0


RATES = (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
GOALS = {"Digits": Goal(Digits(), 0.15, 100, 2), "ByteGPT": Goal(ByteGPT(), 2.5, 120, 5)}
METHODS = {
    "SGD": Method((RATES, (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)), (4, 2), "momentum"),
    "KFAC": Method((RATES, (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)), (3, 3), "damping"),
    "Newton": Method(((0.25, 0.5, 1.0, 2.0, 4.0), (1e-4, 1e-3, 1e-2, 0.1, 1.0)), (1, 1), "damping", 0.4),
}
PAIRS = [("Digits", "SGD"), ("Digits", "KFAC"), ("Digits", "Newton"), ("ByteGPT", "SGD"), ("ByteGPT", "KFAC")]


def experiment(goal: str, method: str, rate: float, other: float, **rest: Any) -> Experiment:
    """Returns an experiment of a method with these two settings."""
    strategy: Any = DDP() if method == "SGD" else {"KFAC": KFAC, "Newton": Newton}[method](damping=other)
    optimizer = SGD(momentum=other if method == "SGD" else 0.9)
    return Experiment(task=GOALS[goal].task, strategy=strategy, optimizer=optimizer, lr=rate, **rest).checked()


def curve(goal: str, method: str, at: tuple[int, int], seed: int, steps: int) -> list[tuple[int, float]]:
    """Returns (step, held-out loss) of one run."""
    (rates, others), g = METHODS[method].ladders, GOALS[goal]
    e = experiment(goal, method, rates[at[0]], others[at[1]], ranks=RANKS, steps=steps, eval_every=g.every, seed=seed,
                   pace=1.0)  # fmt: skip
    rows = simulate(e, real=True).timeline.samples.rows()
    rows = rows[rows.equal("name", "held_out")]
    return [(int(s), float(v)) for s, v in zip(rows.step, rows.value, strict=True)]


def reached(goal: str, found: list[Any]) -> float:
    """Returns the first step with the target loss; infinite if there is none."""
    return min((step for step, loss in found if loss <= GOALS[goal].loss), default=math.inf)


def score(goal: str, curves: list[Any]) -> tuple[float, float]:
    """Returns the score to minimise: the worst run's steps, then the worst loss at the target (or at the end)."""
    steps = [reached(goal, found) for found in curves]
    there = [dict(map(tuple, found)).get(step, found[-1][1]) for step, found in zip(steps, curves, strict=True)]
    return max(steps), max(x if math.isfinite(x) else math.inf for x in there)


def wanted(goal: str, method: str, cells: dict[str, Any]) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yields the missing runs of one pair in order, as (place on the ladders, seed, steps)."""
    m = METHODS[method]
    most = round(m.share * GOALS[goal].steps)
    window = [(m.begin[0] + i, m.begin[1] + k) for i in range(3) for k in range(3)]
    while True:
        for at, seed in itertools.product(window, TUNING):
            if key(goal, method, at, seed) not in cells and not _hopeless(goal, method, at, cells):
                yield at, seed, int(min(most, _least(goal, method, cells)))
        best = best_of(goal, method, cells)
        around = [(best[0] + i, best[1] + k) for i in (-1, 0, 1) for k in (-1, 0, 1)]
        window = [at for at in around if all(0 <= x < len(ladder) for x, ladder in zip(at, m.ladders, strict=True))]
        if set(window) <= set(tried(goal, method, cells)):
            break
    yield from ((best, seed, most) for seed in SEEDS if key(goal, method, best, seed) not in cells)


def key(goal: str, method: str, at: tuple[int, int], seed: int) -> str:
    return f"{goal} {method} {at[0]} {at[1]} {seed}"


def tried(goal: str, method: str, cells: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns every place that all tuning seeds have tried, or enough seeds to exclude it."""
    done = [at for at in _places(method) if len(_curves(goal, method, at, cells)) == len(TUNING)]
    return done + [at for at in _places(method) if at not in done and _hopeless(goal, method, at, cells)]


def best_of(goal: str, method: str, cells: dict[str, Any]) -> tuple[int, int]:
    """Returns the place with the best score among those that all tuning seeds have tried."""
    whole = [at for at in _places(method) if len(_curves(goal, method, at, cells)) == len(TUNING)]
    return min(whole, key=lambda at: score(goal, _curves(goal, method, at, cells)))


def _places(method: str) -> list[tuple[int, int]]:
    first, second = METHODS[method].ladders
    return list(itertools.product(range(len(first)), range(len(second))))


def _curves(goal: str, method: str, at: tuple[int, int], cells: dict[str, Any]) -> list[Any]:
    """Returns the tuning runs at a place."""
    return [cells[k] for seed in TUNING if (k := key(goal, method, at, seed)) in cells]


def _least(goal: str, method: str, cells: dict[str, Any]) -> float:
    """Returns the steps of the best place so far; infinite without one."""
    found = (_curves(goal, method, at, cells) for at in _places(method))
    return min((score(goal, curves)[0] for curves in found if len(curves) == len(TUNING)), default=math.inf)


def _hopeless(goal: str, method: str, at: tuple[int, int], cells: dict[str, Any]) -> bool:
    """Whether one run of a place is already worse than the best place so far."""
    curves = _curves(goal, method, at, cells)
    return bool(curves) and score(goal, curves)[0] > _least(goal, method, cells)


def nbytes(goal: str, method: str, at: tuple[int, int]) -> float:
    """Returns the mean bytes that simulated rank 0 sends in a step."""
    (rates, others), steps = METHODS[method].ladders, 2 * PERIOD
    e = experiment(goal, method, rates[at[0]], others[at[1]], ranks=RANKS, steps=steps, eval_every=0, pace=1.0)
    spans = simulate(e, real=False).timeline.spans.rows()
    mine = spans[(spans.rank == 0) & spans.equal("lane", "comm") & (spans.step >= PERIOD)]
    return float(mine.nbytes.sum()) / PERIOD


# -- seconds, on real ranks --


class Held:
    """One method's session in this process, driven block by block."""

    def __init__(self, e: Experiment, rank: int, where: tuple[str, int], name: str, out: Path) -> None:
        session = Session(e, rank=rank, size=PROCESSES, store=where, run_id=name, secret=b"bench",
                          epoch=time.time(), run_dir=out / name)  # fmt: skip
        self.training = session.set_up()
        self.training.host.drive_coroutine(self.training.place_state())

    def block(self) -> None:
        for _ in range(BLOCK):
            self.training.host.drive_coroutine(self.training.make_due_changes())
            self.training.host.drive_coroutine(self.training.make_step())


def rank_main(rank: int, where: tuple[str, int], goal: str, settings: dict[str, tuple[float, float]], out: str) -> None:
    torch.set_num_threads(1)
    meet = Wire(connect_store(*where, "bench"), rank, PROCESSES, "meet", LeaveEvent())
    held = {}
    for name, (rate, other) in settings.items():
        e = experiment(goal, name, rate, other, ranks=PROCESSES, eval_every=0)
        held[name] = Held(e, rank, where, name, Path(out))
    rows = []
    for r in range(ROUNDS + 1):
        for name in list(held)[:: 1 if r % 2 else -1]:
            meet.wait(meet.all_reduce(torch.zeros(1)))
            began = time.perf_counter()
            held[name].block()
            meet.wait(meet.all_reduce(torch.zeros(1)))
            if r:
                rows.append((r - 1, name, (time.perf_counter() - began) / BLOCK))
    Path(out, f"rows-{rank}.json").write_text(json.dumps(rows))
    os._exit(0)


def seconds(goal: str, settings: dict[str, tuple[float, float]]) -> list[list[Any]]:
    """Returns (round, method, seconds per step) of rank 0."""
    kept, *where = host_store()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        procs = [spawn.Process(target=rank_main, args=(r, tuple(where), goal, settings, out)) for r in range(PROCESSES)]
        for p in procs:
            p.start()
        for p in procs:
            p.join()
        found: list[list[Any]] = json.loads(Path(out, "rows-0.json").read_text())
    del kept
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    a = ask.parse_args()
    torch.set_num_threads(1)
    data: dict[str, Any] = {"cells": {}, "bytes": {}, "seconds": {}}
    if a.out.exists():
        data = json.loads(a.out.read_text())
    for goal, method in PAIRS:
        for at, seed, steps in wanted(goal, method, data["cells"]):
            found = data["cells"][key(goal, method, at, seed)] = curve(goal, method, at, seed, steps)
            values = [ladder[i] for ladder, i in zip(METHODS[method].ladders, at, strict=True)]
            print(f"{goal} {method} {values} seed {seed}: {reached(goal, found)}, {found[-1][1]:.3f}", flush=True)
            a.out.write_text(json.dumps(data))
        data["bytes"][f"{goal} {method}"] = nbytes(goal, method, best_of(goal, method, data["cells"]))
    for goal in GOALS:
        if goal in data["seconds"]:
            continue
        best = {m: best_of(g, m, data["cells"]) for g, m in PAIRS if g == goal}
        settings = {m: (METHODS[m].ladders[0][at[0]], METHODS[m].ladders[1][at[1]]) for m, at in best.items()}
        data["seconds"][goal] = seconds(goal, settings)
        middles = {m: statistics.median(s for _, name, s in data["seconds"][goal] if name == m) for m in settings}
        print(f"{goal}: seconds per step {middles}", flush=True)
        a.out.write_text(json.dumps(data))
    a.out.write_text(json.dumps(data))


if __name__ == "__main__":
    main()
