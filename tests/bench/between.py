"""Compares all-reduces of two sites: whole, compressed by every rank, and compressed only between sites.

Six ranks in two sites start a sum together, by their common clock. It ends when the last rank has it. The three ways
take turns in alternating rounds. The emulated Links are slow between the sites, so that the bytes decide the time and
not the load of the cores. Next to each is the simulator's prediction from the Link's own numbers, without the time to
encode.

    python -m tests.bench.between --out docs/data/between.json          (about seven minutes; resumes)
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tests.bench.algorithms import RANKS, AtOnce, Cell, Wires, asked, seconds, task, timed
from tests.bench.netns import Ranks
from tests.bench.page import table
from workbench import simulate
from workbench.compressors import BetweenSites, Compressor, Dense, TopK
from workbench.experiment import Experiment
from workbench.fabric.algorithms import Algorithm, Ring, TwoLevel
from workbench.rank import Bucket, Memory, Rank
from workbench.record.store import write_atomically

DENSITY = 0.05
SITE = 3
WAYS: dict[str, tuple[Algorithm, Compressor]] = {
    "whole, in one ring": (Ring(), Dense()),
    "whole, in two levels": (TwoLevel(), Dense()),
    "compressed by every rank": (Ring(), TopK(density=DENSITY)),
    "compressed between sites": (Ring(), BetweenSites(of=TopK(density=DENSITY), site=SITE)),
}
SIZES = (16_000, 64_000, 256_000)  # elements of float32
SLOW = Wires(mbit=200.0, latency=2.0, site=SITE, between_mbit=10.0, between_latency=10.0)
WIRES = {
    SLOW: SIZES,
    replace(SLOW, between_mbit=50.0): SIZES,
    replace(SLOW, mbit=20.0, between_mbit=20.0): SIZES,  # hardly slower between the sites than inside
}


@dataclass(frozen=True, kw_only=True)
class CodedAtOnce(AtOnce):
    """One sum per step as the run's compressor makes it, which all ranks start at a time of the clock."""

    async def exchange(self, rank: Rank, x: torch.Tensor) -> None:
        if rank.compressor.immediate:
            await rank.all_reduce(x, name="x")
        else:
            await rank.compressor.reduce(rank, Bucket(0, x, (), 0), Memory())


@dataclass(frozen=True, kw_only=True)
class CodedNow(CodedAtOnce):
    """The same for the simulator, where all ranks start their first step together."""

    async def step(self, rank: Rank, state: Any) -> None:
        began = await rank.clock()
        await self.exchange(rank, torch.ones(self.numel))
        await rank.sample("took", await rank.clock() - began)


def experiment(cell: Cell, strategy: AtOnce) -> Experiment:
    """Returns a run of sums by the cell's way. A strategy that steps by itself also tests compressors."""
    algorithm, compressor = WAYS[cell.way]
    return Experiment(task=task(), ranks=RANKS, eval_every=0, strategy=strategy, compressor=compressor, pace=1.0,
                      fabric=cell.wires.fabric(algorithm))  # fmt: skip


def measure(one: dict[str, Any], rank: int, size: int, store: tuple[str, int], generation: str) -> list[float]:
    """Returns one rank's seconds of each sum."""
    cell = Cell(**{**one, "wires": Wires(**one["wires"])})
    e = experiment(cell, CodedAtOnce(numel=cell.numel, slot=cell.slot))
    return timed(e, rank, store, generation, loopback=True)


def predicted(wires: Wires, way: str, numel: int) -> float:
    """Returns the simulated seconds until the last rank has the sum."""
    cell = Cell(wires=wires, way=way, numel=numel, slot=1.0)
    run = simulate(replace(experiment(cell, CodedNow(numel=numel)), steps=1), real=True)
    took = run.samples[run.samples.name == "took"]
    return float(took.value.max())


def cell_of(wires: Wires, numel: int, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Measures all ways on the same wires, in alternating rounds."""
    said = {way: predicted(wires, way, numel) for way in WAYS}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            cell = Cell(wires=wires, way=way, numel=numel, slot=round(1.5 * said[way] + 0.15, 2))
            took[way].append(seconds(ranks, cell))
    return {"wires": asdict(wires), "about": str(wires), "numel": numel, "predicted": said, "took": took}


def section(d: list[dict[str, Any]]) -> str:
    """Returns the page's section, from the raw numbers."""
    rows, right, off = [], 0, []
    for found in d:
        took = {way: statistics.median(each) for way, each in found["took"].items()}
        said, first = found["predicted"], min(took, key=lambda way: took[way])
        chosen = min(said, key=lambda way: said[way])
        right += chosen == first
        off += [abs(said[way] / took[way] - 1) for way in took]
        each = [f"{took[way] * 1e3:.0f} ({said[way] * 1e3:.0f})" for way in WAYS]
        rows.append([found["about"], f"{4 * found['numel'] / 1e3:g}", *each, first.replace("whole", "uncompressed")])
    rounds = min((len(each) for found in d for each in found["took"].values()), default=0)
    about = (
        f"{RANKS} ranks in two sites start a sum together, by a common clock. It ends when the last rank has the sum. "
        f"Times are ms, medians of {rounds} alternating rounds. In brackets is the simulator's prediction from the "
        f"Link's own numbers, without the time to encode. Compressed by every rank: `TopK(density={DENSITY:g})`. "
        "Compressed between sites: `BetweenSites` of it, uncompressed inside a site.\n\nThe predicted fastest way is "
        f"the fastest in {right} of {len(d)} cells. Predictions are off by {statistics.median(off):.1%} in the median "
        f"and by {max(off):.1%} at most."
    )
    ways = [way.replace("whole", "uncompressed") for way in WAYS]
    return f"{about}\n\n{table(['network', 'kB', *ways, 'fastest'], rows)}"


def main() -> None:
    a = asked(__doc__, measure)
    out = json.loads(a.out.read_text()) if a.out and a.out.exists() else []
    there = {(found["about"], found["numel"]) for found in out}
    left = [(w, n) for w, sizes in WIRES.items() for n in sizes if (str(w), n) not in there]
    with Ranks(RANKS, module="tests.bench.between") as ranks:
        for wires, numel in left:
            out.append(cell_of(wires, numel, ranks, a.rounds))
            print(f"{wires}, {4 * numel / 1e3:g} kB", flush=True)
            if a.out:
                write_atomically(a.out, json.dumps(out))
    print(section(out))


if __name__ == "__main__":
    main()
