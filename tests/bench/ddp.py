"""Compares our DDP and ZeRO3 with torch's DDP and `fully_shard` in alternating blocks of one run.

Each rank is a process that holds both: our session (recording on) and torch's in a plain loop. Blocks of a few steps
alternate ours, torch, torch, ...; the second torch block of each round is the A/A control.

    python -m tests.bench.ddp --out docs/data/ddp.json
    python -m tests.bench.ddp --strategy ZeRO3 --caps 1 5 --rounds 12 --out docs/data/fsdp.json
    python -m tests.bench.ddp --gpus 1 --ranks 1 2 --rounds 12 --out docs/data/gpu_ddp.json

On GPUs ranks use NCCL. If there are fewer GPUs than ranks, ranks share one and claim to be different hosts.
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

from tests.gpu_ranks import share_a_gpu
from workbench.engine.baselines.units import find_units
from workbench.engine.collectives.wire import Wire, host_store
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.memory.batches import move_to_device
from workbench.tasks import ByteGPT, Task

BLOCK, ON_GPU = 3, 20  # steps in a block


class MLP(nn.Sequential):
    """8 M parameters in eight layers."""

    def __init__(self, layers: int = 8, width: int = 1000) -> None:
        inner: list[nn.Module] = []
        for _ in range(layers):
            inner += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*inner, nn.Linear(width, 10))


def mlp_data(rank: int, ranks: int, seed: int, width: int = 1000, size: int = 32) -> list[tuple[torch.Tensor, ...]]:
    rng = torch.Generator().manual_seed(seed + rank)
    return [(torch.randn(size, width, generator=rng), torch.randint(10, (size,), generator=rng)) for _ in range(8)]


def wide() -> MLP:
    """67 M parameters in sixteen layers."""
    return MLP(16, 2048)


def wide_data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    return mlp_data(rank, ranks, seed, 2048, 4096)


def mlp_loss(model: nn.Module, pair: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(pair[0]), pair[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def tasks() -> dict[str, Any]:
    return {"ByteGPT": ByteGPT(), "MLP 8 M": Task(model=MLP, data=mlp_data, loss=mlp_loss, optimizer=sgd),
            "MLP 67 M": Task(model=wide, data=wide_data, loss=mlp_loss, optimizer=sgd)}  # fmt: skip


class Ours:
    """The engine's session, driven block by block."""

    def __init__(
        self, e: Experiment, rank: int, where: tuple[str, int], out: Path, generation: str = "ours", device: str = "cpu"
    ) -> None:
        session = Session(
            e, rank=rank, size=e.ranks, store=where, run_id=generation, secret=b"ours", epoch=time.time(),
            run_dir=out, device=device, kind=KINDS[device.partition(":")[0]],
        )  # fmt: skip
        self.training = session.set_up()
        self.training.host.drive_coroutine(self.training.place_state())

    def block(self, steps: int) -> None:
        for _ in range(steps):
            self.training.host.drive_coroutine(self.training.make_due_changes())
            self.training.host.drive_coroutine(self.training.make_step())


class Torchs:
    """Torch's own way as in its documentation, with an empty loop around it."""

    def __init__(
        self,
        task: Any,
        cap: float,
        wire: Wire,
        store: Any,
        rank: int,
        size: int,
        wrap: Callable[..., nn.Module],
        device: str = "cpu",
    ) -> None:
        learner = task.build()
        torch.manual_seed(0)
        self.device = device
        e = Experiment(task=task, ranks=size).filled()
        self.ddp = wrap(learner.model().to(device), cap, wire, store)
        self.optimizer = learner.optimizer(list(self.ddp.parameters()), e.lr)
        self.loss = learner.loss
        self.data = itertools.cycle(learner.data(rank, size, e.batch, 0))

    def block(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.loss(self.ddp, move_to_device(next(self.data), self.device))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.device == "cpu":  # on a CPU this read costs nothing
                float(loss.detach())


def ddp(model: nn.Module, cap: float, wire: Wire, store: Any) -> nn.Module:
    """Wraps `model` in DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(
        model, process_group=wire.lend_group(), bucket_cap_mb=cap * 1e6 / 2**20, gradient_as_bucket_view=True,
        static_graph=True,
    )  # fmt: skip


def fsdp(model: nn.Module, cap: float, wire: Wire, store: Any) -> nn.Module:
    """Applies FSDP2 to layers with as many megabytes of parameters as a bucket, or to a transformer's blocks."""
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.PrefixStore("fsdp", store)
    torch.distributed.init_process_group("gloo", store=store, rank=wire.rank, world_size=wire.size)
    for unit in find_units(model, cap):
        fully_shard(unit)
    fully_shard(model)
    return model


KINDS = {"cpu": "gloo", "cuda": "nccl"}
RIVALS: dict[str, Callable[..., nn.Module]] = {"DDP": ddp, "ZeRO3": fsdp}


def rank_main(
    rank: int, size: int, where: tuple[str, int], name: str, cap: float, rounds: int, out: str, only: str,
    strategy: str, gpus: int = 0,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    device = f"cuda:{rank % gpus}" if gpus else "cpu"
    if size > gpus > 0:
        share_a_gpu(rank)
    from workbench.engine.collectives.wire import LeaveEvent, connect_store

    store = connect_store(*where, "bench")
    leaving = LeaveEvent()
    wire = Wire(store, rank, size, "torch", leaving, kind=KINDS[device.partition(":")[0]], on=device)
    meet = Wire(store, rank, size, "meet", leaving)
    task = tasks()[name]
    sides = {}
    if only != "torch":
        e = Experiment(task=task, ranks=size, bucket_mb=cap, eval_every=0).set("strategy", strategy)
        sides["ours"] = Ours(e, rank, where, Path(out), device=device)
    if only != "ours":
        sides["torch"] = Torchs(task, cap, wire, store, rank, size, RIVALS[strategy], device)
    order = {"both": ["ours", "torch", "torch"], "ours": ["ours"], "torch": ["torch"]}[only]
    rows, block = [], ON_GPU if gpus else BLOCK
    for r in range(rounds + 2):
        turn = order if r % 2 else order[::-1]
        for position, side in enumerate(turn):
            meet.wait(meet.all_reduce(torch.zeros(1)))
            began = time.perf_counter()
            sides[side].block(block)
            if gpus:
                torch.cuda.synchronize()
            meet.wait(meet.all_reduce(torch.zeros(1)))
            if r >= 2:
                rows.append((r - 2, side, position, (time.perf_counter() - began) / block))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(out, f"rows-{rank}.json").write_text(json.dumps({"rows": rows, "peak_kb": peak}))
    os._exit(0)


def cell(name: str, size: int, cap: float, rounds: int, only: str = "both", strategy: str = "DDP",
         gpus: int = 0) -> dict[str, Any]:  # fmt: skip
    """Measures one cell of the table: raw block times of rank 0, and the largest peak memory."""
    kept, *where = host_store()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        rest = (size, tuple(where), name, cap, rounds, out, only, strategy, gpus)
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
    """Returns per round torch's mean time over ours (throughput ratio), and torch's first block over its second."""
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
    ask.add_argument("--tasks", nargs="*", default=["ByteGPT", "MLP 8 M"], choices=list(tasks()))
    ask.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    ask.add_argument("--caps", nargs="*", type=float, default=[1, 5, 25])
    ask.add_argument("--gpus", type=int, default=0)
    ask.add_argument("--strategy", choices=list(RIVALS), default="DDP")
    a = ask.parse_args()
    cells = []
    for name in a.tasks:
        for size in a.ranks:
            for cap in a.caps:
                found = cell(name, size, cap, a.rounds, strategy=a.strategy, gpus=a.gpus)
                r = ratios(found["rows"])
                middle = {k: sorted(v)[len(v) // 2] for k, v in r.items()}
                ms = [1e3 * x[3] for x in found["rows"] if x[1] == "torch"]
                print(
                    f"{name:8} {size} ranks {cap:4g} MB: torch {sorted(ms)[len(ms) // 2]:.1f} ms, "
                    f"ours/torch {middle['ours']:.3f}, torch/torch {middle['control']:.3f}",
                    flush=True,
                )
                for only in ("ours", "torch") if cap == max(a.caps) else ():
                    found[f"peak_{only}_kb"] = cell(name, size, cap, 2, only, a.strategy, a.gpus)["peak_kb"]
                cells.append(found)
                if a.out:
                    a.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
