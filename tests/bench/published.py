"""Predicts results of large published clusters with the simulator, next to the published values.

Two checks, sizes only, in virtual time. Megatron-LM's interleaved schedule on the 175-billion-parameter GPT of
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
https://arxiv.org/abs/2104.04473: 96 layers, hidden size 12,288, sequences of 2,048, 96 GPUs, micro-batches of one
sequence (sections 2.2 and 5.3.2). And the bytes and memory of ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", 2020, https://arxiv.org/abs/1910.02054, sections 5 and 7.

Of the eight GPUs of a host that share a stage, one is simulated. Its layers are as wide as its eighth of the traffic
between stages. Traffic among the eight inside the host counts as compute.

    python -m tests.bench.published --out docs/data/published.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench import Costs, simulate
from workbench.analysis import measure_memory, step_times
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline
from workbench.partitions.schedules import Interleaved, OneFOneB
from workbench.strategies import DDP, Strategy, ZeRO1, ZeRO2, ZeRO3
from workbench.tasks import ByteGPT, Task

LAYERS, WIDTH, SEQUENCE, VOCABULARY, GPUS, INSIDE = 96, 12_288, 2048, 51_200, 96, 8
STAGES = GPUS // INSIDE
RATE = 150e12  # FLOP/s of a computing GPU; the paper reports 149e12 for this model on 768 GPUs in total (table 2)
PORT = 200_000.0  # Mbit/s: eight 200 Gbit/s adapters in a host of eight GPUs (section 5)
BATCHES = (12, 24, 36, 48, 60)
CHUNKS = (1, 2, 4)
RANKS = (8, 64, 512, 4096)
ZEROS: tuple[Strategy, ...] = (DDP(), ZeRO1(), ZeRO2(), ZeRO3())


def flops(sequences: int) -> float:
    """Returns the FLOPs of one batch with recomputed activations (the paper's section 5.1)."""
    s, h, n = SEQUENCE, WIDTH, LAYERS
    return 96.0 * sequences * s * n * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * n * h))


def _data(rank: int, ranks: int, seed: int, batch: int) -> list[Tensor]:
    return [torch.zeros(batch, SEQUENCE, 1, dtype=torch.bfloat16)]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x.expand(-1, -1, model[0].in_features))
    return made.square().mean()


def gpt(features: int) -> Task:
    """Returns a stack of equal layers that pass on `features` numbers of 2 bytes for each position of a sequence."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(features, features, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))

    return Task(model=model, data=_data, loss=_loss, optimizer=lambda params: torch.optim.SGD(params, 0.1))


def step(batch: int, chunks: int, stages: int = STAGES, scattered: bool = True, wire: bool = True) -> dict[str, float]:
    """Returns the seconds of a replica's step, and the bytes that a middle stage sends in it.

    scattered: whether each GPU sends its eighth of the traffic (the paper's scatter/gather), or all of it
    """
    schedule = OneFOneB() if chunks == 1 else Interleaved(chunks=chunks)
    e = Experiment(
        task=gpt(WIDTH // INSIDE if scattered else WIDTH), ranks=stages, steps=2, eval_every=0, batch=batch,
        partition=Pipeline(stages=stages, micros=batch, schedule=schedule), bucket_mb=64.0, strategy=DDP(),
        fabric=Fabric(link=Link(bandwidth=PORT if wire else 0.0, latency=0.005 if wire else 0.0)),
    )  # fmt: skip
    computing = flops(batch) / INSIDE / RATE  # of all stages
    run = simulate(e, costs=Costs(forward=computing / 4, backward=computing * 3 / 4))
    spans = run.spans
    mine = spans[(spans["rank"] == stages // 2) & (spans.step == 1) & (spans.lane == "comm")]
    return {"seconds": float(step_times(run.timeline, 1, 2).seconds.max()), "sent": int(mine.nbytes.sum())}


def interleaved() -> list[dict[str, Any]]:
    """Returns steps by batch and pieces per stage: without a network, with an eighth sent per GPU, or with all."""
    rows = []
    for batch in BATCHES:
        for chunks in CHUNKS:
            found = {"free": step(batch, chunks, wire=False), "scattered": step(batch, chunks),
                     "whole": step(batch, chunks, scattered=False)}  # fmt: skip
            rows.append({"batch": batch, "chunks": chunks, "stages": STAGES, "ideal": flops(batch) / GPUS / RATE,
                         **{name: each["seconds"] for name, each in found.items()},
                         "sent": found["scattered"]["sent"]})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def zero_run(strategy: Strategy, ranks: int, layers: int) -> dict[str, Any]:
    """Returns the bytes that a rank sends in a step and those that it keeps, with hosts of eight ranks."""
    e = Experiment(
        task=ByteGPT(layers=layers, width=256), ranks=ranks, optimizer=AdamW(), batch=8, pace=60.0, bucket_mb=1.0,
        steps=4, eval_every=0, strategy=strategy,
        fabric=Fabric(link=Link(bandwidth=1e6), site=8, between_bandwidth=PORT),
    )  # fmt: skip
    run = simulate(e, alike=True)
    spans = run.spans
    last = spans[(spans.step == 3) & (spans.lane == "comm")]
    kept = measure_memory(run.timeline)[0].most
    return {
        "strategy": type(strategy).__name__, "ranks": ranks, "layers": layers, "sent": int(last.nbytes.sum()),
        "model": run.environment["ranks"][0]["nbytes"],
        **{name: kept[name] for name in ("parameters", "gradients", "optimizer state")},
    }  # fmt: skip


def zero() -> list[dict[str, Any]]:
    return [zero_run(strategy, ranks, layers) for layers in (4, 24) for ranks in RANKS for strategy in ZEROS]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    a = ask.parse_args()
    found = {"interleaved": interleaved(), "zero": zero()}
    if a.out:
        a.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
