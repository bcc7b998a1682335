"""Compares the emulated Link with a real network: paced DDP on both, same bandwidth, no latency.

Real: a process per rank in its own network namespace, gloo over its port, tc tbf on the port. Modelled: the same
processes on the loopback, slowed to a Link. It also compares the record's bytes with the port's counter.

    python -m tests.bench.netns --out docs/data/netns.json          (Linux, root, iproute2)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from tests.network import INTERFACE, Network
from tests.ranks import Rows
from tests.spinning import spinning
from workbench.engine.collectives.wire import host_store
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.tasks import Task

WARM = 3  # steps before counting
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting: `layers` square layers of `width` in buckets of `bucket_mb` over ports of `mbit` Mbit/s."""

    mbit: float
    width: int
    bucket_mb: float
    layers: int = 16
    pace: float = 100.0  # ms of compute per step
    steps: int = 12
    real: bool = True  # false: on an emulated Link

    def experiment(self, ranks: int) -> Experiment:
        task = Task(
            model=partial(layered, self.layers, self.width), data=partial(rows, self.width),
            loss=squares, optimizer=partial(torch.optim.SGD, lr=1e-4),
        )  # fmt: skip
        fabric = Fabric() if self.real else Fabric(link=Link(bandwidth=self.mbit))
        return Experiment(task=task, ranks=ranks, bucket_mb=self.bucket_mb, pace=self.pace, fabric=fabric, eval_every=0)


def layered(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def rows(width: int, rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    return [torch.randn(1, width, generator=torch.Generator().manual_seed(seed + rank))]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def cells(*rates: float, steps: int = 12) -> list[Cell]:
    """Returns two bucket sizes at each rate, with models whose exchange takes about as long as their compute."""
    size = {50: 128, 200: 256, 1000: 512}
    buckets = {128: (0.26, 0.52), 256: (0.26, 1.04), 512: (1.04, 4.19)}
    return [Cell(mbit=r, width=size[r], bucket_mb=b, steps=steps) for r in rates for b in buckets[size[r]]]


# -- a rank --


def measure(asked: dict[str, Any], rank: int, size: int, store: tuple[str, int], generation: str) -> dict[str, Any]:
    """Returns one rank's step times, the bytes in its record and the bytes that its port sent."""
    cell = Cell(**asked)
    session = Session(
        cell.experiment(size),
        rank=rank,
        size=size,
        store=store,
        run_id=generation,
        secret=b"ours",
        epoch=time.time(),
        loopback=not cell.real,
    )
    session.record.close()
    session.record = Rows()
    training = session.set_up()
    for step in range(WARM + cell.steps):
        if step == WARM:
            before, idle, began = counted(), idled(), time.perf_counter()
        training.host.drive_coroutine(training.make_due_changes())
        training.host.drive_coroutine(training.make_step())
    sent, busy = counted() - before, 1 - (idled() - idle) / (time.perf_counter() - began)
    lasted = [r[5] - r[4] for r in session.record if r[1] == "step" and r[0] >= WARM]
    payload = sum(n for step, _, n in session.record.comm() if step >= WARM)
    session.tear_down()
    return {"steps": lasted, "payload": payload, "sent": sent, "busy": busy}


def idled() -> float:
    """Returns the idle seconds of this machine's cores, on average over cores."""
    return float(Path("/proc/uptime").read_text().split()[1]) / (os.cpu_count() or 1)


def counted() -> int:
    """Returns the bytes that this namespace's port has sent (with headers); 0 without such a port."""
    file = Path("/sys/class/net", INTERFACE, "statistics/tx_bytes")
    return int(file.read_text()) if file.exists() else 0


def rank_main(rank: int, size: int, address: str, measured: Callable[..., Any]) -> NoReturn:
    """Answers one line of JSON per cell until none is left. Rank 0 first prints the address of the store.

    measured: function of (a cell as a dict, rank, size, the store's address, the run's generation) -> this rank's
    results
    """
    torch.set_num_threads(1)
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # so that other load disturbs neither side
    if rank == 0:
        _store, *where = host_store(address)
        print(json.dumps(where), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = measured(asked["cell"], rank, size, tuple(asked["where"]), asked["generation"])
        print(json.dumps(found), flush=True)
    os._exit(0)


# -- all ranks --


class Ranks:
    """A process for each rank in the namespaces of `network` (without one: on the loopback).

    module: runs as `-m MODULE --rank RANK SIZE ADDRESS` in each process and calls `rank_main`
    """

    def __init__(self, size: int, network: Network | None = None, module: str = "tests.bench.netns") -> None:
        self.size, self.network = size, network
        address = Network.address(0) if network else "127.0.0.1"
        env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.processes = []
        for rank in range(size):
            argv = [sys.executable, "-m", module, "--rank", str(rank), str(size), address]
            argv = network.command(rank, argv) if network else argv
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self.processes.append(subprocess.Popen(argv, cwd=ROOT, env=env, **pipes))

    def __enter__(self) -> Ranks:
        self.where = self._answer(0, 60)
        return self

    def __exit__(self, *_: Any) -> None:
        for p in self.processes:
            p.kill()
        for p in self.processes:
            p.communicate()

    def run(self, cell: Any, within: float = 120) -> list[Any]:
        """Returns each rank's results of a cell, a dataclass with its ports' `mbit`. Raises TimeoutError."""
        if self.network:
            self.network.set_rate(cell.mbit)
        asked = json.dumps({"cell": asdict(cell), "where": self.where, "generation": uuid.uuid4().hex})
        for p in self.processes:
            p.stdin.write(asked + "\n")
        ends = time.monotonic() + within
        return [self._answer(rank, ends - time.monotonic()) for rank in range(self.size)]

    def _answer(self, rank: int, within: float) -> Any:
        pipe = self.processes[rank].stdout
        if not select.select([pipe], [], [], max(within, 0))[0]:
            raise TimeoutError(f"rank {rank} said nothing for {within:.0f} s")
        line = pipe.readline()
        if not line:
            raise RuntimeError(f"rank {rank} ended with {self.processes[rank].wait()}")
        return json.loads(line)


def awake() -> AbstractContextManager[None]:
    """Keeps every core awake with a busy process of the lowest priority on each.

    A virtual machine's idle core returns to its host and comes back late. Every frame between two namespaces wakes a
    core. Ports of 1000 Mbit/s then carry at most 750, with both cores 75 % idle. If the cores stay awake, ports carry
    more than 900, and the emulated Link is within 8 % at each rate.
    """
    return spinning(os.cpu_count() or 1, nice=19)


def compare(real: Ranks, modelled: Ranks, cell: Cell) -> dict[str, Any]:
    """Runs both sides of one cell, and a control with hardly any exchange."""
    found = {"real": real.run(cell), "modelled": modelled.run(replace(cell, real=False))}
    found["control"] = real.run(replace(cell, layers=1, width=1, pace=10.0))
    return {"cell": asdict(cell), "ranks": real.size, **found}


def ratio(found: dict[str, Any], quartile: int = 1) -> float:
    """Returns the modelled step over the real one."""
    return step(found["modelled"], quartile) / step(found["real"], quartile)


def step(ranks: list[dict[str, Any]], quartile: int = 1) -> float:
    """Returns the seconds of a step: a quartile over steps of the mean over ranks.

    The first quartile is that of an undisturbed step: other load makes steps longer on either side, never shorter.
    """
    means = [statistics.fmean(s) for s in zip(*(r["steps"] for r in ranks), strict=True)]
    return statistics.quantiles(means, n=4)[quartile - 1]


def excess(found: dict[str, Any]) -> list[float]:
    """Returns each rank's relative excess of sent bytes over the record, after subtracting the control run."""
    pairs = zip(found["real"], found["control"], strict=True)
    return [(a["sent"] - b["sent"]) / (a["payload"] - b["payload"]) - 1 for a, b in pairs]


def in_words(found: dict[str, Any]) -> str:
    """Formats one cell as one line."""
    cell, over = found["cell"], excess(found)
    return (
        f"{found['ranks']} ranks, frames of {found['frame']}, {cell['mbit']:g} Mbit/s, {cell['bucket_mb']:g} MB: "
        f"real {step(found['real']) * 1e3:.0f} ms, modelled / real {ratio(found):.3f}, port over record "
        f"{min(over):+.3f} to {max(over):+.3f}, cores busy {found['real'][0]['busy']:.2f}"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rank", nargs=3, default=None, help=argparse.SUPPRESS)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    ask.add_argument("--frames", nargs="*", type=int, default=[9000, 1500])
    ask.add_argument("--rates", nargs="*", type=int, default=[50, 200, 1000])
    ask.add_argument("--steps", type=int, default=12)
    a = ask.parse_args()
    if a.rank:
        return rank_main(int(a.rank[0]), int(a.rank[1]), a.rank[2], measure)
    out = []
    for size, frame in itertools.product(a.ranks, a.frames):
        with awake(), Network(size, frame) as network, Ranks(size, network) as real, Ranks(size) as modelled:
            for cell in cells(*a.rates, steps=a.steps):
                found = {**compare(real, modelled, cell), "frame": frame}
                out.append(found)
                print(in_words(found), flush=True)
                if a.out:
                    a.out.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
