"""Our strategies against torch's own at their best, in alternating blocks of one run: DDP and ZeRO3 (`fully_shard`).

Each rank is a process that holds both: our session (recording on) and torch's in a plain loop. Blocks of a few steps
alternate ours, torch, torch, ...; the second torch block of each round is the A/A control.

    python -m tests.bench.ddp --out docs/data/ddp.json
    python -m tests.bench.ddp --strategy ZeRO3 --caps 1 5 --rounds 12 --out docs/data/fsdp.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.engine.collectives import Wire, host_store
from workbench.engine.session import Session
from workbench.engine.units import units
from workbench.experiment import Experiment
from workbench.tasks import ByteGPT, Task

BLOCK = 3  # steps in a block


class MLP(nn.Sequential):
    """8 M parameters in eight layers."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(1000, 1000), nn.ReLU()]
        super().__init__(*layers, nn.Linear(1000, 10))


def mlp_data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed + rank)
    return [(torch.randn(32, 1000, generator=rng), torch.randint(10, (32,), generator=rng)) for _ in range(8)]


def mlp_loss(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(pair[0]), pair[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def tasks() -> dict[str, Any]:
    return {"ByteGPT": ByteGPT(), "MLP 8 M": Task(model=MLP, data=mlp_data, loss=mlp_loss, optimizer=sgd)}


class Ours:
    """The engine's session, driven a block at a time."""

    def __init__(self, e: Experiment, rank: int, where: tuple[str, int], out: Path, generation: str = "ours") -> None:
        session = Session(
            e, rank=rank, size=e.ranks, store=where, generation=generation, secret=b"ours", epoch=time.time(),
            run_dir=out,
        )  # fmt: skip
        self.training = session.set_up()
        self.training.host.drive(self.training.lay_out())

    def block(self, steps: int) -> None:
        for _ in range(steps):
            self.training.host.drive(self.training.boundary())
            self.training.host.drive(self.training.step())


class Torchs:
    """torch's own, as its documentation would have it: nothing in the loop but training."""

    def __init__(self, task: Any, cap: float, wire: Wire, store: Any, rank: int, size: int,
                 wrap: Callable[..., nn.Module]) -> None:
        learner = task.build()
        torch.manual_seed(0)
        e = Experiment(task=task, ranks=size).filled()
        self.ddp = wrap(learner.model(), cap, wire, store)
        self.optimizer = learner.optimizer(list(self.ddp.parameters()), e.lr)
        self.loss = learner.loss
        self.data = itertools.cycle(learner.data(rank, size, e.batch, 0))

    def block(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.loss(self.ddp, next(self.data))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            float(loss.detach())


def ddp(model: nn.Module, cap: float, wire: Wire, store: Any) -> nn.Module:
    """DistributedDataParallel around `model`."""
    return nn.parallel.DistributedDataParallel(
        model, process_group=wire.group, bucket_cap_mb=cap * 1e6 / 2**20, gradient_as_bucket_view=True,
        static_graph=True,
    )  # fmt: skip


def fsdp(model: nn.Module, cap: float, wire: Wire, store: Any) -> nn.Module:
    """FSDP2 on every layer with so many megabytes of parameters as a bucket has, or the blocks of a transformer."""
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.PrefixStore("fsdp", store)
    torch.distributed.init_process_group("gloo", store=store, rank=wire.rank, world_size=wire.size)
    for unit in units(model, cap):
        fully_shard(unit)
    fully_shard(model)
    return model


RIVALS: dict[str, Callable[..., nn.Module]] = {"DDP": ddp, "ZeRO3": fsdp}


def rank_main(
    rank: int, size: int, where: tuple[str, int], name: str, cap: float, rounds: int, out: str, only: str, strategy: str
) -> None:
    torch.set_num_threads(1)
    from workbench.engine.collectives import Leaving, connect_store

    store = connect_store(*where, "bench")
    leaving = Leaving()
    wire = Wire(store, rank, size, "torch", leaving)
    meet = Wire(store, rank, size, "meet", leaving)
    task = tasks()[name]
    sides = {}
    if only != "torch":
        e = Experiment(task=task, ranks=size, bucket_mb=cap, eval_every=0).set("strategy", strategy)
        sides["ours"] = Ours(e, rank, where, Path(out))
    if only != "ours":
        sides["torch"] = Torchs(task, cap, wire, store, rank, size, RIVALS[strategy])
    order = {"both": ["ours", "torch", "torch"], "ours": ["ours"], "torch": ["torch"]}[only]
    rows = []
    for r in range(rounds + 2):
        turn = order if r % 2 else order[::-1]
        for position, side in enumerate(turn):
            meet.wait(meet.all_reduce(torch.zeros(1)))
            began = time.perf_counter()
            sides[side].block(BLOCK)
            meet.wait(meet.all_reduce(torch.zeros(1)))
            if r >= 2:
                rows.append((r - 2, side, position, (time.perf_counter() - began) / BLOCK))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(out, f"rows-{rank}.json").write_text(json.dumps({"rows": rows, "peak_kb": peak}))
    os._exit(0)


def cell(name: str, size: int, cap: float, rounds: int, only: str = "both", strategy: str = "DDP") -> dict[str, Any]:
    """One cell of the table: raw block times of rank 0, and the largest peak memory."""
    kept, *where = host_store()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        rest = (size, tuple(where), name, cap, rounds, out, only, strategy)
        procs = [spawn.Process(target=rank_main, args=(r, *rest)) for r in range(size)]
        for p in procs:
            p.start()
        for p in procs:
            p.join()
        found = [json.loads(Path(out, f"rows-{r}.json").read_text()) for r in range(size)]
    del kept
    return {
        "strategy": strategy,
        "task": name,
        "ranks": size,
        "bucket_mb": cap,
        "rows": found[0]["rows"],
        "peak_kb": max(f["peak_kb"] for f in found),
    }


def ratios(rows: list[list[Any]]) -> dict[str, list[float]]:
    """Per round: torch's mean time over ours (throughput ratio), and torch's first block over its second."""
    by_round: dict[int, dict[str, list[float]]] = {}
    for r, side, _, seconds in rows:
        by_round.setdefault(r, {}).setdefault(side, []).append(seconds)
    both = [v for v in by_round.values() if "ours" in v]
    return {
        "ours": [sum(v["torch"]) / len(v["torch"]) / v["ours"][0] for v in both],
        "control": [v["torch"][0] / v["torch"][1] for v in by_round.values() if len(v.get("torch", [])) == 2],
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=30)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--tasks", nargs="*", default=list(tasks()))
    ask.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    ask.add_argument("--caps", nargs="*", type=float, default=[1, 5, 25])
    ask.add_argument("--strategy", choices=list(RIVALS), default="DDP")
    a = ask.parse_args()
    cells = []
    for name in a.tasks:
        for size in a.ranks:
            for cap in a.caps:
                found = cell(name, size, cap, a.rounds, strategy=a.strategy)
                r = ratios(found["rows"])
                middle = {k: sorted(v)[len(v) // 2] for k, v in r.items()}
                ms = [1e3 * x[3] for x in found["rows"] if x[1] == "torch"]
                print(
                    f"{name:8} {size} ranks {cap:4g} MB: torch {sorted(ms)[len(ms) // 2]:.1f} ms, "
                    f"ours/torch {middle['ours']:.3f}, torch/torch {middle['control']:.3f}",
                    flush=True,
                )
                for only in ("ours", "torch") if cap == max(a.caps) else ():
                    found[f"peak_{only}_kb"] = cell(name, size, cap, 2, only, a.strategy)["peak_kb"]
                cells.append(found)
                if a.out:
                    a.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
