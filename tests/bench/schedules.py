"""Compares our pipelines with torch's own (`torch.distributed.pipelining`) in alternating blocks of one run.

Each of four ranks is a process with both: our session (recording on) and torch's stage of the same model in a plain
loop. Layers sleep, so four ranks on two cores behave like devices, and record the times. Blocks of a few steps
alternate ours, torch, torch, ...; the second torch block of each round is the A/A control. At the start one step of
each is compared for the distance of their gradients.

    python -m tests.bench.schedules --out docs/data/schedules.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.ddp import Ours, ratios
from workbench.engine.collectives.wire import LeaveEvent, Wire, connect_store, host_store
from workbench.experiment import Experiment
from workbench.partitions import Pipeline
from workbench.tasks import Task

STAGES, LAYERS, MICROS, WIDTH, ROWS = 4, 8, 8, 32, 16
FORWARD, BACKWARD = 0.01, 0.02  # seconds of a micro-batch in one layer; a stage has two
BLOCK, LR = 2, 0.1
KINDS = [("GPipe", "GPipe", 1), ("1F1B", "OneFOneB", 1), ("interleaved 1F1B", "Interleaved", 2)]

Pass = tuple[float, float]
noted: list[Pass] = []  # times of this process's layers since the last reset


class _Padded(torch.autograd.Function):
    """The identity with a delay in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:  # torch asks for shapes first
            _sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _sleep(BACKWARD)
        return grad


def _sleep(seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    noted.append((began, time.perf_counter()))


class Layer(nn.Module):
    """A linear layer in double precision that takes as long as on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded: torch.Tensor = _Padded.apply(torch.tanh(self.linear(x)))
        return padded


def model() -> nn.Module:
    """Returns eight equal layers, the same in all processes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*[Layer() for _ in range(LAYERS)])


def data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns one batch, over and over."""
    rng = torch.Generator().manual_seed(5)
    both = torch.randn(2, ROWS, WIDTH, generator=rng, dtype=torch.float64)
    return [(both[0], both[1])]


def loss(net: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(net(pair[0]), pair[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


class Torchs:
    """Torch's own schedule of the same pieces, as in its documentation."""

    def __init__(self, kind: str, pieces: int, rank: int) -> None:
        from torch.distributed import pipelining

        layers, count = list(model()), STAGES * pieces
        each = LAYERS // count
        mine = range(rank, count, STAGES)
        self.parts = [nn.Sequential(*layers[k * each : (k + 1) * each]) for k in mine]
        cpu = torch.device("cpu")
        stages = [pipelining.PipelineStage(part, k, count, cpu) for part, k in zip(self.parts, mine, strict=True)]
        classes = {"GPipe": pipelining.ScheduleGPipe, "OneFOneB": pipelining.Schedule1F1B,
                   "Interleaved": pipelining.ScheduleInterleaved1F1B}  # fmt: skip
        self.schedule: Any = classes[kind](stages if pieces > 1 else stages[0], MICROS,
                                           loss_fn=nn.functional.mse_loss)  # fmt: skip
        self.rank, (self.x, self.y) = rank, data(0, 1, 0)[0]
        self.optimizer = sgd([p for part in self.parts for p in part.parameters()])

    def block(self, steps: int) -> None:
        for _ in range(steps):
            first, last = [self.x] if self.rank == 0 else [], self.rank == STAGES - 1
            self.schedule.step(*first, **({"target": self.y, "losses": []} if last else {}))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for part in self.parts for p in part.parameters()]


def ours(kind: str, rank: int, where: tuple[str, int], out: Path) -> Ours:
    """Returns our session with the same pieces on the same stages."""
    partition = Pipeline(stages=STAGES, micros=MICROS)
    task = Task(model=model, data=data, loss=loss, optimizer=sgd)
    e = Experiment(task=task, ranks=STAGES, eval_every=0, partition=partition).set("partition.schedule", kind)
    return Ours(e, rank, where, out, kind)


def apart(mine: Ours, theirs: Torchs) -> float:
    """Returns the largest difference between both results of one step on a stage, relative to the largest change."""
    before = theirs.weights()
    mine.block(1)
    theirs.block(1)
    found = dict(mine.training.model.named_parameters())
    here = [found[place.name] for place in sorted(mine.training.layout.order, key=lambda p: list(found).index(p.name))]
    moved = [was - now for was, now in zip(before, theirs.weights(), strict=True)]
    pairs = [(was - p.detach(), m) for was, p, m in zip(before, here, moved, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(m.abs().max()) for m in moved)


@contextmanager
def among_all(store: Any, rank: int) -> Iterator[None]:
    """Provides torch's default group while the block runs."""
    store = torch.distributed.PrefixStore("default", store)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=STAGES)
    yield
    torch.distributed.destroy_process_group()


def rank_main(rank: int, where: tuple[str, int], rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    store = connect_store(*where, "bench")
    meet = Wire(store, rank, STAGES, "meet", LeaveEvent())
    cells = []
    with among_all(store, rank):
        for name, kind, pieces in KINDS:
            sides: dict[str, Any] = {"ours": ours(kind, rank, where, Path(out)), "torch": Torchs(kind, pieces, rank)}
            found = apart(sides["ours"], sides["torch"])
            rows, passes = [], []
            for number in range(rounds + 1):
                turn = ["ours", "torch", "torch"] if number % 2 else ["torch", "torch", "ours"]
                for position, side in enumerate(turn):
                    meet.wait(meet.all_reduce(torch.zeros(1)))
                    noted.clear()
                    began = time.perf_counter()
                    sides[side].block(BLOCK)
                    meet.wait(meet.all_reduce(torch.zeros(1)))
                    if number:  # the first round differs from later ones
                        rows.append((number - 1, side, position, (time.perf_counter() - began) / BLOCK))
                        passes.append(_by_step(list(noted)))
            cells.append({"name": name, "pieces": pieces, "apart": found, "rows": rows, "passes": passes})
    Path(out, f"rows-{rank}.json").write_text(json.dumps(cells))
    os._exit(0)


def _by_step(passes: list[Pass]) -> list[tuple[float, float, float]]:
    """Returns by step of a block: start of the first pass, end of the last one and total duration of passes."""
    each = len(passes) // BLOCK
    steps = [passes[k * each : (k + 1) * each] for k in range(BLOCK)]
    return [(step[0][0], step[-1][1], sum(b - a for a, b in step)) for step in steps]


def bubbles(ranks: list[list[list[tuple[float, float, float]]]]) -> list[float]:
    """Returns by block the mean share of time from first to last pass in which a stage is idle."""
    found = []
    for block in zip(*ranks, strict=True):
        steps = list(zip(*block, strict=True))  # of all ranks
        shares = [1 - sum(s[2] for s in step) / len(step) / (max(s[1] for s in step) - min(s[0] for s in step))
                  for step in steps]  # fmt: skip
        found.append(sum(shares) / len(shares))
    return found


def measured(rounds: int) -> list[dict[str, Any]]:
    kept, *where = host_store()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        procs = [spawn.Process(target=rank_main, args=(r, tuple(where), rounds, out)) for r in range(STAGES)]
        for p in procs:
            p.start()
        for p in procs:
            p.join()
        every = [json.loads(Path(out, f"rows-{r}.json").read_text()) for r in range(STAGES)]
    del kept
    cells = []
    for of_ranks in zip(*every, strict=True):
        first = of_ranks[0]
        still = bubbles([cell["passes"] for cell in of_ranks])
        blocks = [[*row, share] for row, share in zip(first["rows"], still, strict=True)]
        cells.append({"name": first["name"], "pieces": first["pieces"], "stages": STAGES, "micros": MICROS,
                      "apart": max(cell["apart"] for cell in of_ranks), "rows": blocks})  # fmt: skip
    return cells


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=12)
    ask.add_argument("--out", type=Path, default=None)
    a = ask.parse_args()
    cells = measured(a.rounds)
    for cell in cells:
        middle = {k: sorted(v)[len(v) // 2] for k, v in ratios([row[:4] for row in cell["rows"]]).items()}
        still = {side: sorted(r[4] for r in cell["rows"] if r[1] == side) for side in ("ours", "torch")}
        print(f"{cell['name']}: ours/torch {middle['ours']:.3f}, torch/torch {middle['control']:.3f}; bubble ours "
              f"{still['ours'][len(still['ours']) // 2]:.3f}, torch {still['torch'][len(still['torch']) // 2]:.3f}; "
              f"gradients apart by {cell['apart']:.1e}", flush=True)  # fmt: skip
    if a.out:
        a.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
