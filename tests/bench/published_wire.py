# ruff: noqa: E501
"""Predicts the bandwidth that methods need and the gain of overlap, next to published values.

Two checks, sizes only, in virtual time. The first is the bandwidth at which ranks compute a share of their time (CU):
Douillard et al., "Streaming DiLoCo with Overlapping Communication", 2025, https://arxiv.org/abs/2501.18512, table 4.
Its model of 1 billion parameters has 24 layers and 0.1 s of computing per step, H = 100 and fragments of three layers.
The second is the gain of overlap in DistributedDataParallel: Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704,
abstract and section 5.

    python -m tests.bench.published_wire --out docs/data/published_wire.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench import Costs
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.fabric.algorithms import DoubleTree
from workbench.sim.plan.quick_simulator import QuickSimulator
from workbench.strategies import DDP, DiLoCo, Strategy, StreamingDiLoCo
from workbench.tasks import Task

LAYERS, WIDTH, STEP, PERIOD, FRAGMENTS = 24, 6455, 0.1, 100, 8  # 24 layers of 6455 x 6455 are 1.0 billion parameters
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
RANKS = 2  # replicas: the table does not give their number
DELAY = 5  # steps of overlap: the table does not give them, the paper finds fewer than 5 robust
CLOSE = 0.02  # relative precision of a bandwidth
METHODS: dict[str, tuple[Strategy, tuple[float, ...]]] = {  # table 4, 1 billion parameters: Gbit/s for each share
    "data parallel": (DDP(), (86.8, 152.6, 184.2, 222.3, 569.0)),
    "DiLoCo": (DiLoCo(every=PERIOD), (1.4, 6.2, 13.3, 23.3, 86.8)),
    "Streaming DiLoCo": (StreamingDiLoCo(every=PERIOD, fragments=FRAGMENTS, delay=0, bits=32), (1.4, 5.2, 9.1, 16.0, 28.1)),
    "Streaming DiLoCo, overlapped": (StreamingDiLoCo(every=PERIOD, fragments=FRAGMENTS, delay=DELAY, bits=32), (1.4, 4.3, 6.2, 9.1, 11.0)),
    "Streaming DiLoCo, overlapped, 4 bits": (StreamingDiLoCo(every=PERIOD, fragments=FRAGMENTS, delay=DELAY), (0.4, 0.9, 1.7, 2.0, 3.0)),
}  # fmt: skip
RESNET, V100S = 25.6e6, 8  # parameters of ResNet-50, in fp32; GPUs of a host
OVERLAP = {"ResNet-50": 0.380, "BERT": 0.352}  # NCCL, section 5: how much shorter a step is with overlap
SIZES = (2, 8, 32, 128, 256)


def _data(rank: int, ranks: int, seed: int, batch: int) -> list[Tensor]:
    return [torch.zeros(batch, 1, dtype=torch.bfloat16)]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x.expand(-1, model[0].in_features))
    return made.square().mean()


def stack(layers: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Task:
    """A stack of equal layers."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers)))

    return Task(model=model, data=_data, loss=_loss, optimizer=lambda params: torch.optim.SGD(params, 0.1))


def needed(quick: QuickSimulator, e: Experiment, share: float, known: dict[float, float]) -> float:
    """Returns the bandwidth in Gbit/s at which `share` of a step is computing, by bisection."""
    low, high = 0.05, 3000.0
    while high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        if middle not in known:
            known[middle] = STEP / quick.predict_step(e.set("fabric.link.bandwidth", middle * 1e3)).seconds
        low, high = (low, middle) if known[middle] >= share else (middle, high)
    return high


def table(methods: tuple[str, ...] = tuple(METHODS)) -> list[dict[str, Any]]:
    """Returns Gbit/s by method and share, predicted and published."""
    task = stack(LAYERS, WIDTH)
    quick, rows = QuickSimulator(Experiment(task=task, ranks=RANKS), Costs(forward=STEP / 3, backward=STEP * 2 / 3)), []
    for name in methods:
        strategy, published = METHODS[name]
        e = Experiment(
            task=task,
            ranks=RANKS,
            strategy=strategy,
            bucket_mb=100.0,
            eval_every=0,
            fabric=Fabric(link=Link(bandwidth=1e5)),
        )
        known: dict[float, float] = {}
        found = [needed(quick, e, share, known) for share in SHARES]
        rows.append({"method": name, "published": published, "predicted": found, "sent": quick.predict_step(e).sent})
        print(rows[-1], flush=True)
    return rows


def overlap() -> dict[str, Any]:
    """Returns DDP's largest gain from overlap by duration of compute, and its step by ranks."""
    width, layers = 1031, 24  # 25.5 million parameters
    task, rows = stack(layers, width, torch.float32), []
    wire = {"fabric": Fabric(link=Link(bandwidth=100_000 / V100S, latency=0.014))}
    e = Experiment(task=task, ranks=32, strategy=DDP(), eval_every=0, **wire)
    for computing in (0.03, 0.06, 0.09, 0.12, 0.2, 0.4):
        quick = QuickSimulator(e, Costs(forward=computing / 3, backward=computing * 2 / 3))
        apart, beside = (
            quick.predict_step(e.set("bucket_mb", 200.0)).seconds,
            quick.predict_step(e.set("bucket_mb", 25.0)).seconds,
        )
        rows.append({"computing": computing, "apart": apart, "beside": beside})
    quick = QuickSimulator(e, Costs(forward=0.06, backward=0.12))
    scale = {f"{p}": quick.predict_step(replace(e, bucket_mb=25.0, ranks=p)).seconds for p in SIZES}
    trees = e.set("fabric.algorithm", DoubleTree())
    tree = {f"{p}": quick.predict_step(replace(trees, bucket_mb=25.0, ranks=p)).seconds for p in SIZES if p <= 32}
    return {"overlap": rows, "ranks": scale, "trees": tree}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    a = ask.parse_args()
    found = {"ddp": overlap(), "bandwidth": table()}
    if a.out:
        a.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
