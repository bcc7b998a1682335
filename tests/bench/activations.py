# ruff: noqa: E501
"""Measures the loss and the saved bytes of compressed activations, between two stages and in two slices.

The settings are those of Bian et al., "Does compressing activations help model parallel training?", 2023,
https://arxiv.org/abs/2301.02654: none, fp16, 8 bits, Top-k and a low rank, forward, backward and both. ByteGPT trains
from its start, simulated with real tensors. Existing results are not run again.

    python -m tests.bench.activations --out docs/data/activations.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench import Experiment, simulate
from workbench.compressors import ByteGrad, Cast, Compressor, Dense, Projection, TopK
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.rank import Memory
from workbench.run import Run
from workbench.tasks import ByteGPT

STEPS, SEEDS, LAST, REPEATS = 200, 3, 20, 50
TASK = ByteGPT()
CODECS: dict[str, Compressor] = {
    "fp16": Cast(to="fp16"), "8 bits": ByteGrad(), "Top-k 10 %": TopK(density=0.1), "rank 20": Projection(rank=20),
}  # fmt: skip
CHOOSE = ("Top-k 10 %", "rank 20")  # drop elements that gradients may drop, too
WAYS: dict[str, Partition] = {"2 stages": Pipeline(micros=2), "2 slices": Tensor()}


class Row(NamedTuple):
    """way: the partition on two ranks; direction: forward, backward, both, or "both, one choice", or empty"""

    way: str
    codec: str
    direction: str

    @property
    def partition(self) -> Partition:
        way: Any = WAYS[self.way]
        if self.codec == "none":
            return way
        codec, one = CODECS[self.codec], self.direction == "both, one choice"
        there = codec if self.direction != "backward" else Dense()
        back = codec if self.direction in ("backward", "both") or (one and self.way == "2 slices") else Dense()
        return replace(way, activations=there, gradients=back, mask=one)


def rows() -> list[Row]:
    """Returns the rows to compare."""
    found = []
    for way in WAYS:
        found.append(Row(way, "none", ""))
        for codec in CODECS:
            several = ["forward", "backward", "both", *(["both, one choice"] if codec in CHOOSE else [])]
            found += [Row(way, codec, direction) for direction in several]
    return found


def losses(e: Experiment) -> tuple[float, float, Run]:
    """Returns a simulated run with its training loss of the last steps and its final held-out loss."""
    run = simulate(e, real=True)
    samples = run.timeline.samples.rows()
    mine = samples[samples.rank == 0]
    trained, held_out = (mine.value[mine.equal("name", name)].tolist() for name in ("loss", "held_out"))
    return statistics.fmean(trained[-LAST:]), held_out[-1], run


def measured(row: Row, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Makes one run: losses, and the bytes of activations and their gradients in its last step on both ranks."""
    e = Experiment(task=TASK, ranks=2, steps=steps, seed=seed, pace=1.0, eval_every=steps, partition=row.partition)
    loss, held_out, run = losses(e)
    spans = run.spans
    crossing = spans[(spans.lane == "comm") & (spans.step == steps - 1)]
    crossing = crossing[~crossing.name.str.contains("loss|parameters|activation byte|activation head")]
    said = {what: int(crossing[crossing.name.str.contains(what)].nbytes.sum()) for what in ("activation", "gradient")}
    return {"loss": loss, "held_out": held_out, **said}


def timed() -> dict[str, dict[str, float]]:
    """Returns by codec the seconds to encode and decode one stage's output of a batch on one thread, and bytes."""
    x = torch.randn(TASK.batch, TASK.context, TASK.width, generator=torch.Generator().manual_seed(0))
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for name, codec in CODECS.items():
        coder, took = codec.coder(Memory()), []
        assert coder is not None
        for _ in range(REPEATS):
            began = time.perf_counter()
            payload = coder.encode(x)
            coder.decode(payload, x)
            took.append(time.perf_counter() - began)
        nbytes = sum(part.numel() * part.element_size() for part in payload)
        found[name] = {"seconds": statistics.median(took), "nbytes": nbytes, "dense": x.numel() * 4}
    torch.set_num_threads(threads)
    return found


def todo(cells: list[dict[str, Any]]) -> Iterator[tuple[Row, int]]:
    """Yields the missing runs, seed by seed."""
    there = {(c["way"], c["codec"], c["direction"], c["seed"]) for c in cells}
    return ((row, seed) for seed in range(SEEDS) for row in rows() if (*row, seed) not in there)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, required=True)
    a = ask.parse_args()
    found = json.loads(a.out.read_text()) if a.out.exists() else {"steps": STEPS, "cells": []}
    for row, seed in list(todo(found["cells"])):
        found["cells"].append({**row._asdict(), "seed": seed, **measured(row, seed)})
        a.out.write_text(json.dumps(found, indent=1))
        print(*row, seed, {k: v for k, v in found["cells"][-1].items() if k in ("loss", "held_out")}, flush=True)
    found["timed"] = timed()
    a.out.write_text(json.dumps(found, indent=1))


def text(found: dict[str, Any]) -> str:
    """Returns the section of the page."""
    from tests.bench.page import table

    seeds = sorted({c["seed"] for c in found["cells"]})
    by: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for c in found["cells"]:
        by.setdefault((c["way"], c["codec"], c["direction"]), []).append(c)
    lines = []
    for row in rows():
        mine, plain = by.get(row, []), by.get((row.way, "none", ""), [])
        if mine and plain:
            lines.append(_line(row, mine, plain))
    head = ["", "codec", "compressed", "training loss", "over none", "held-out loss, uncompressed", "over none",
            "bytes forward", "bytes backward"]  # fmt: skip
    said = "\n".join(_said(way, by) for way in WAYS if (way, "none", "") in by)
    return f"{_about(found, seeds)}\n\n{table(head, lines)}\n{said}\n\n{_times(found)}\n{PAPERS}\n"


def _line(row: Row, mine: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    told = [row.way, row.codec, row.direction]
    for name in ("loss", "held_out"):
        told += [_spread([c[name] for c in mine]), _over(mine, plain, name) if row.codec != "none" else ""]
    return [*told, *(f"{_share(mine[0][what], plain[0][what])}" for what in ("activation", "gradient"))]


def _said(way: str, by: dict[tuple[str, str, str], list[dict[str, Any]]]) -> str:
    """Returns which rows change the training loss by more than the spread of seeds."""
    plain = by[way, "none", ""]
    noise = max(c["loss"] for c in plain) - min(c["loss"] for c in plain)
    off = {f"{codec} {direction}": float(_over(mine, plain, "loss")) for (its, codec, direction), mine in by.items()
           if its == way and codec != "none"}  # fmt: skip

    def told(rows: dict[str, float]) -> str:
        return ", ".join(f"{name} ({x:+.2f})" for name, x in sorted(rows.items(), key=lambda one: one[1])) or "nothing"

    worse = {name: x for name, x in off.items() if x > noise}
    better = {name: x for name, x in off.items() if x < -noise}
    return (
        f"* {way}: seeds of none are {noise:.2f} apart. Beyond that cost: {told(worse)}. Beyond that gain: "
        f"{told(better)}. All else is within it. {_directions(off, noise)}"
    ).rstrip()


def _directions(off: dict[str, float], noise: float) -> str:
    """Returns the direction in which each codec costs more.

    off: training loss over none, by codec and direction
    """
    alike, said = [], []
    ways = [name.removesuffix(" forward") for name in off if name.endswith(" forward")]
    for codec in (name for name in ways if f"{name} backward" in off):
        there, back = off[f"{codec} forward"], off[f"{codec} backward"]
        if max(abs(there), abs(back)) <= noise:
            alike.append(codec)
        elif abs(there - back) <= noise:
            said.append(f"{codec} costs as much either way ({there:+.2f} forward, {back:+.2f} backward)")
        else:
            way = "forward" if there > back else "backward"
            said.append(f"{codec} costs more {way} ({there:+.2f} forward, {back:+.2f} backward)")
    said += [f"with {', '.join(alike)} neither does"] if alike else []
    return f"Which direction matters: {'; '.join(said)}." if said else ""


def _spread(values: list[float]) -> str:
    if not all(map(math.isfinite, values)):
        return "not finite"
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _over(mine: list[dict[str, Any]], plain: list[dict[str, Any]], name: str) -> str:
    base = {c["seed"]: c[name] for c in plain}
    return f"{statistics.fmean(c[name] - base[c['seed']] for c in mine if c['seed'] in base):+.3f}"


def _share(nbytes: int, dense: int) -> str:
    return f"{nbytes / 1e3:.0f} kB, {nbytes / dense:.0%}"


def _about(found: dict[str, Any], seeds: list[int]) -> str:
    return (
        f"ByteGPT from its beginning, {found['steps']} steps of {TASK.batch} windows on two "
        f"ranks, simulated with real tensors, mean and range of {len(seeds)} seeds; all rows at the task's own learning "
        f"rate {TASK.lr:g}, none is tuned (of two the next section is). Between 2 stages (two micro-batches) each activation and its gradient cross once; "
        f"inside of 2 slices each layer's do, what an embedding finds and what the head answers not counted, which "
        f"cross as they are. The training loss is the mean of the last {LAST} steps, with compression; the held-out "
        f"loss is that of the same model computed without. Bytes are those of both ranks in one step, beside their share "
        f'of what crosses without a codec. "Forward" leaves gradients alone, whatever was left out; with "one '
        f'choice" a gradient goes back through what the forward has chosen, which between stages is all that crosses.'
    )


def _times(found: dict[str, Any]) -> str:
    from tests.bench.page import table

    lines = []
    for name, t in found.get("timed", {}).items():
        below = 8e-6 * (t["dense"] - t["nbytes"]) / t["seconds"]
        lines.append([name, f"{t['seconds'] * 1e3:.2f}", f"{t['nbytes'] / t['dense']:.0%}", f"{below:,.0f}"])
    head = ["codec", "encode and decode, ms", "bytes", "pays below, Mbit/s"]
    about = (
        f"What a codec takes for the {TASK.batch} x {TASK.context} x {TASK.width} floats that one layer hands on, on one "
        f"thread of this machine (median of {REPEATS}), and below which bandwidth that is less than what it saves:"
    )
    return f"{about}\n\n{table(head, lines)}"


PAPERS = """What the papers say, as far as their abstracts could be checked: Bian et al. (https://arxiv.org/abs/2301.02654)
compare pruning, learning and quantization in more than 160 settings and find model parallelism fundamentally different from
data parallelism; numbers of their tables are not repeated here. Activations and Gradients Compression for Model-Parallel Training
(https://arxiv.org/abs/2401.07788) finds that gradients ask for milder compression than activations, that 10 % is the least
of Top-k that does no severe harm, and that a model trained with Top-k does well only if it is applied in inference, too."""


if __name__ == "__main__":
    main()
