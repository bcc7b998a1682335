"""Finds the fastest all-reduce by cost models and measurements: on emulated Links and on real ports.

Six ranks start an all-reduce together, by their common clock. It ends when the last rank has the sum. Algorithms take
turns of some all-reduces each, in alternating rounds. Emulated: processes on the loopback, slowed to a Link. Real: a
process in its own network namespace, with tc tbf on its port. There latency is the time to send, which is fitted to the
rings alone, like all other inputs of the models.

    python -m tests.bench.algorithms --out docs/data/algorithms.json          (real: Linux, root, iproute2)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from tests.bench.netns import Ranks, awake, rank_main
from tests.bench.page import table
from tests.network import Network, why_not
from tests.ranks import Rows
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.fabric.algorithms import (
    Algorithm,
    DoubleTree,
    HalvingDoubling,
    Hierarchical,
    ParameterServer,
    Ring,
    TwoLevel,
)
from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies import Strategy
from workbench.tasks import Task

RANKS, SUMS, ROUNDS = 6, 3, 3  # all-reduces of a turn, without the first
FLAT: dict[str, Algorithm] = {
    "ring": Ring(),
    "halving and doubling": HalvingDoubling(),
    "double tree": DoubleTree(),
    "one server": ParameterServer(),
}
SITES: dict[str, Algorithm] = {"tree of leaders": TwoLevel(), "hierarchical": Hierarchical()}  # by rings between sites
ALL = {**FLAT, **SITES}
CLOSE = 1.03  # at most this ratio to the fastest: equally fast
ASKED = 9  # of ten cells


@dataclass(frozen=True, kw_only=True)
class Wires:
    """Ports of `mbit` Mbit/s and messages of `latency` ms; the second numbers are for messages to another site."""

    mbit: float
    latency: float = 0.0
    site: int = 0
    between_mbit: float = 0.0
    between_latency: float = 0.0
    real: bool = False

    def fabric(self, algorithm: Algorithm) -> Fabric:
        link = Link() if self.real else Link(bandwidth=self.mbit, latency=self.latency)
        return Fabric(link=link, site=self.site, between_bandwidth=self.between_mbit,
                      between_latency=self.between_latency, algorithm=algorithm)  # fmt: skip

    @property
    def ways(self) -> dict[str, Algorithm]:
        """The algorithms to compare on these wires."""
        return ALL if self.site else FLAT

    def __str__(self) -> str:
        if self.real:
            return f"ports of {self.mbit:g} Mbit/s"
        inside = f"{self.mbit:g} Mbit/s, {self.latency:g} ms"
        if not self.site:
            return inside
        between = f"{self.between_mbit:g} Mbit/s, {self.between_latency:g} ms"
        return f"{inside}; between sites of {self.site} ranks: {between}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All-reduces of `numel` floats by one algorithm; starts are `slot` seconds apart."""

    wires: Wires
    way: str
    numel: int
    slot: float

    @property
    def mbit(self) -> float:
        return self.wires.mbit


EMULATED = {
    Wires(mbit=100.0, latency=20.0): (4_000, 64_000, 256_000, 1_000_000),
    Wires(mbit=20.0, latency=20.0): (4_000, 64_000, 256_000),
    Wires(mbit=60.0, latency=5.0, site=3, between_mbit=20.0, between_latency=20.0): (4_000, 64_000, 256_000),
}  # elements of float32
REAL = {Wires(mbit=20.0, real=True): (250, 1_000, 4_000, 16_000, 64_000)}


@dataclass(frozen=True, kw_only=True)
class AtOnce(Strategy):
    """One all-reduce per step. All ranks start it at a time of the clock, and its duration is sampled."""

    numel: int = knob(1, 1, 10**9, doc="elements")
    slot: float = knob(1.0, 0.0, 1e3, unit="s", doc="from one beginning to the next")
    lockstep: ClassVar[bool] = True

    async def step(self, rank: Rank, state: Any) -> None:
        x = torch.ones(self.numel)
        begin = torch.tensor([(time.time() // self.slot + 2) * self.slot], dtype=torch.float64)
        await rank.broadcast(begin, 0, "when")  # rank 0's, because another rank's clock may be past the edge of a slot
        while (left := float(begin) - time.time()) > 0:
            time.sleep(min(left, 1e-3))
        late = -left
        await self.exchange(rank, x)
        await rank.sample("took", time.time() - float(begin))
        assert late < 0.5 * self.slot

    async def exchange(self, rank: Rank, x: torch.Tensor) -> None:
        """The timed operation."""
        await rank.all_reduce(x, name="x")
        assert float(x[0]) == rank.size


def task() -> Task:
    return Task(model=partial(nn.Linear, 1, 1), data=nothing, loss=squares, optimizer=partial(torch.optim.SGD, lr=0.1))


def nothing(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    return [torch.zeros(1, 1)]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def measure(one: dict[str, Any], rank: int, size: int, store: tuple[str, int], generation: str) -> list[float]:
    """Returns one rank's seconds of each all-reduce."""
    cell = Cell(**{**one, "wires": Wires(**one["wires"])})
    e = Experiment(task=task(), ranks=size, eval_every=0, strategy=AtOnce(numel=cell.numel, slot=cell.slot),
                   fabric=cell.wires.fabric(ALL[cell.way]))  # fmt: skip
    return timed(e, rank, store, generation, loopback=not cell.wires.real)


def timed(e: Experiment, rank: int, store: tuple[str, int], generation: str, loopback: bool) -> list[float]:
    """Returns the durations that one rank's steps sampled, without the first."""
    session = Session(e, rank=rank, size=e.ranks, store=store, run_id=generation, secret=b"ours",
                      epoch=time.time(), loopback=loopback)  # fmt: skip
    session.record.close()
    session.record = rows = Rows()
    training = session.set_up()
    for _ in range(1 + SUMS):
        training.host.drive_coroutine(training.make_due_changes())
        training.host.drive_coroutine(training.make_step())
    session.tear_down()
    return [value for _, name, _, value in rows.samples if name == "took"][1:]


def seconds(ranks: Ranks, cell: Cell) -> float:
    """Returns the median over all-reduces of the time until the last rank had the sum."""
    return statistics.median(max(each) for each in zip(*ranks.run(cell), strict=True))


def fitted(rings: dict[int, float], ranks: int = RANKS) -> tuple[float, float]:
    """Fits (ms of a message, Mbit/s of a port) to the seconds of rings by elements, with relative least squares."""
    p, took = ranks, np.array(list(rings.values()))
    rows = np.array([[2 * (p - 1), 2 * (p - 1) / p * 4 * n] for n in rings])
    (alpha, beta), *_ = np.linalg.lstsq(rows / took[:, None], np.ones(len(took)), rcond=None)
    return float(max(alpha, 0.0) * 1e3), float(8e-6 / beta)


def predicted(wires: Wires, numel: int, link: tuple[float, float] | None = None) -> dict[str, float]:
    """Returns seconds by each algorithm's cost model, on the emulated or the fitted Link."""
    fabric = replace(wires, real=False).fabric(Ring())
    fabric = fabric.measured(*link) if link else fabric
    return {name: way.seconds(fabric, range(RANKS), 4 * numel) for name, way in wires.ways.items()}


def campaign(ranks: Ranks, wires: Wires, sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Runs all algorithms at all sizes on the same wires, in alternating rounds."""
    took: dict[str, dict[int, list[float]]] = {name: {n: [] for n in sizes} for name in wires.ways}
    for number in range(rounds):
        for n in sizes:
            for name, said in predicted(wires, n, (2.0, wires.mbit) if wires.real else None).items():
                cell = Cell(wires=wires, way=name, numel=n, slot=round(1.5 * said + 0.15, 2))
                took[name][n].append(seconds(ranks, cell))
        print(f"{wires}, round {number + 1} of {rounds}", flush=True)
    middle = {name: {n: statistics.median(each) for n, each in by.items()} for name, by in took.items()}
    link = fitted(middle["ring"]) if wires.real else None
    said = {n: predicted(wires, n, link) for n in sizes}
    return {"wires": asdict(wires), "about": str(wires), "link": link, "took": took, "predicted": said}


def cells(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns by size the fastest and the predicted fastest algorithm, and the ratio of their times."""
    out = []
    for n, said in found["predicted"].items():
        took = {name: statistics.median(by[n]) for name, by in found["took"].items()}
        chosen, first = min(said, key=said.get), min(took, key=took.get)
        off = statistics.median(abs(said[name] / took[name] - 1) for name in said)
        over = took[chosen] / took[first]
        out.append({"numel": int(n), "chosen": chosen, "first": first, "over": over, "off": off, "took": took})
    return out


def section(d: list[dict[str, Any]]) -> str:
    """Returns the page's section, from the raw numbers."""
    rows, kept = [], {False: [0, 0], True: [0, 0]}
    for found in d:
        for cell in cells(found):
            right = cell["over"] <= CLOSE
            counts = kept[found["wires"]["real"]]
            counts[0], counts[1] = counts[0] + right, counts[1] + 1
            took = cell["took"]
            second = sorted(took.values())[1]
            rows.append([found["about"], f"{4 * cell['numel'] / 1e3:g}", cell["chosen"], cell["first"],
                         f"{took[cell['first']] * 1e3:.0f}", f"{second * 1e3:.0f}", f"{max(took.values()) * 1e3:.0f}",
                         f"{cell['over']:.2f}", f"{cell['off']:.1%}"])  # fmt: skip
    fits = "; ".join("{:.1f} ms and {:.1f} Mbit/s".format(*found["link"]) for found in d if found["link"]) or "none"
    (emulated, of), (real, of_real) = kept[False], kept[True]
    rounds = min(len(each) for found in d for by in found["took"].values() for each in by.values())
    about = (
        f"{RANKS} ranks start an all-reduce together, by a common clock. It ends when the last rank has the sum. A "
        f"time is the median of {SUMS} all-reduces, and of {rounds} round{'s' * (rounds > 1)} in which the algorithms "
        "take turns. The prediction is the algorithm with the least time by its cost model. On emulated Links the "
        "models take the Link's own numbers. On real ports, in a network namespace each with `tc tbf`, they take "
        f"{fits}, fitted to the rings alone. A prediction holds if the predicted algorithm takes at most {CLOSE:g} "
        f"times as long as the fastest one.\n\nOn emulated Links it holds in {emulated} of {of} cells (goal: {ASKED} "
        f"of 10), on real ports in {real} of {of_real}. The double tree takes the latency from the settings, and on "
        "real ports they have none. So it cuts its data into as many pieces as it may. The prediction for it assumes "
        "another number of pieces."
    )
    head = ["network", "kB", "predicted", "fastest", "fastest, ms", "second, ms", "slowest, ms", "predicted / fastest",
            "error of predictions, median"]  # fmt: skip
    return f"{about}\n\n{table(head, rows)}"


def asked(about: str | None, measure: Callable[..., list[float]]) -> argparse.Namespace:
    """Returns the arguments of a command that measures sums on ranks; never returns in a rank's process."""
    ask = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rank", nargs=3, default=None, help=argparse.SUPPRESS)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--rounds", type=int, default=ROUNDS)
    a = ask.parse_args()
    if a.rank:
        rank_main(int(a.rank[0]), int(a.rank[1]), a.rank[2], measure)
    return a


def main() -> None:
    a = asked(__doc__, measure)
    out = []
    with Ranks(RANKS, module="tests.bench.algorithms") as ranks:
        out += [campaign(ranks, wires, sizes, a.rounds) for wires, sizes in EMULATED.items()]
    if reason := why_not():
        print(f"no real network: {reason}")
    else:
        with awake(), Network(RANKS, 1500) as network, Ranks(RANKS, network, "tests.bench.algorithms") as ranks:
            out += [campaign(ranks, wires, sizes, a.rounds) for wires, sizes in REAL.items()]
    if a.out:
        a.out.write_text(json.dumps(out))
    print(section(json.loads(json.dumps(out))))


if __name__ == "__main__":
    main()
