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
    by, lines = _by_row(found), []
    for row in rows():
        mine, plain = by.get(row, []), by.get((row.way, "none", ""), [])
        if mine and plain:
            lines.append(_line(row, mine, plain))
    head = ["partition", "codec", "compressed", "training loss", "above none", "held-out loss, uncompressed",
            "above none", "bytes forward", "bytes backward"]  # fmt: skip
    said = "\n".join(_said(way, by) for way in WAYS if (way, "none", "") in by)
    return f"{_about(found, seeds)}\n\n{table(head, lines)}\n{said}\n\n{_times(found)}\n{PAPERS}\n"


def _line(row: Row, mine: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    told = [row.way, row.codec, row.direction]
    for name in ("loss", "held_out"):
        told += [_spread([c[name] for c in mine]), _over(mine, plain, name) if row.codec != "none" else ""]
    return [*told, *(f"{_share(mine[0][what], plain[0][what])}" for what in ("activation", "gradient"))]


def find_costly_codecs(found: dict[str, Any]) -> tuple[list[str], float]:
    """Returns the codecs that raise the training loss by more than seeds differ, and the largest rise."""
    by = _by_row(found)
    each = [_differences(way, by) for way in WAYS if (way, "none", "") in by]
    worse = {name: x for off, noise in each for name, x in off.items() if x > noise}
    costly = [codec for codec in CODECS if any(name.startswith(f"{codec} ") for name in worse)]
    return costly, max(worse.values(), default=0.0)


def _by_row(found: dict[str, Any]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    by: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for c in found["cells"]:
        by.setdefault((c["way"], c["codec"], c["direction"]), []).append(c)
    return by


def _differences(way: str, by: dict[tuple[str, str, str], list[dict[str, Any]]]) -> tuple[dict[str, float], float]:
    """Returns the training loss of each row above that of none, and the spread of the seeds of none."""
    plain = by[way, "none", ""]
    off = {f"{codec} {direction}": float(_over(mine, plain, "loss")) for (its, codec, direction), mine in by.items()
           if its == way and codec != "none"}  # fmt: skip
    return off, max(c["loss"] for c in plain) - min(c["loss"] for c in plain)


def _said(way: str, by: dict[tuple[str, str, str], list[dict[str, Any]]]) -> str:
    """Returns which rows change the training loss by more than the spread of seeds."""
    off, noise = _differences(way, by)

    def told(rows: dict[str, float]) -> str:
        return ", ".join(f"{name} ({x:+.2f})" for name, x in sorted(rows.items(), key=lambda one: one[1])) or "no row"

    worse = {name: x for name, x in off.items() if x > noise}
    better = {name: x for name, x in off.items() if x < -noise}
    return (
        f"* {way}: without a codec the seeds differ by {noise:.2f}. Rows with a larger rise of the training loss: {told(worse)}. Rows with a "
        f"larger fall: {told(better)}. All other rows are within this spread. {_directions(off, noise)}"
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
            said.append(f"{codec} costs about as much in both directions ({there:+.2f} forward, {back:+.2f} backward)")
        else:
            way = "forward" if there > back else "backward"
            said.append(f"{codec} costs more {way} ({there:+.2f} forward, {back:+.2f} backward)")
    said += [f"{', '.join(alike)}: within the spread in both directions"] if alike else []
    return f"{'. '.join(said)}." if said else ""


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
        f"ByteGPT trains from its start for {found['steps']} steps of {TASK.batch} windows on two ranks, simulated with real "
        f"tensors. Values are the mean and the range of {len(seeds)} seeds. All rows have the task's own learning rate "
        f"{TASK.lr:g}, and none is tuned. The next section tunes two rows.\n\n"
        "* 2 stages: each activation and its gradient travel once, in two micro-batches.\n"
        "* 2 slices: ranks exchange the activations of every layer, and their gradients. The output of the embedding and that of "
        "the head travel uncompressed and are not counted.\n"
        f"* Training loss: the mean of the last {LAST} steps, with compression. Held-out loss: that of the same model, computed "
        "without compression.\n"
        '* Above none: the mean difference from the row "none", which has no codec, on the same seeds.\n'
        "* Bytes: those of both ranks in one step, and their share of the bytes without a codec.\n"
        '* "forward": gradients travel whole, even those of elements that the codec left out. "one choice": gradients go back only through '
        "what the forward has chosen. Between stages a rank sends only these."
    )


def _times(found: dict[str, Any]) -> str:
    from tests.bench.page import table

    lines = []
    for name, t in found.get("timed", {}).items():
        below = 8e-6 * (t["dense"] - t["nbytes"]) / t["seconds"]
        lines.append([name, f"{t['seconds'] * 1e3:.2f}", f"{t['nbytes'] / t['dense']:.0%}", f"{below:,.0f}"])
    head = ["codec", "encode and decode, ms", "share of bytes", "saves time below, Mbit/s"]
    about = (
        f"The next table has the time of a codec for the {TASK.batch} x {TASK.context} x {TASK.width} floats that one layer passes "
        f"on. It is the median of {REPEATS} on one thread of this machine. Below the bandwidth in the last column a codec takes less "
        "time than its smaller payload saves."
    )
    return f"{about}\n\n{table(head, lines)}"


PAPERS = """These are results of two papers, as far as their abstracts could be checked. Bian et al.
(https://arxiv.org/abs/2301.02654) compare pruning, learning and quantization in more than 160 settings. They find model
parallelism fundamentally different from data parallelism. Numbers of their tables are not repeated here. "Activations and
Gradients Compression for Model-Parallel Training" (https://arxiv.org/abs/2401.07788) finds that gradients need milder
compression than activations. Top-k of 10 % is its strongest Top-k without severe harm. A model that was trained with Top-k
does well only if inference applies Top-k, too."""


if __name__ == "__main__":
    main()
