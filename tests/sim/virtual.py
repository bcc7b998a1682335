"""Shared helpers of the simulator's tests: small simulated runs and readers of their records."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.ranks import experiment
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.run import Run
from workbench.tasks import Task


class Stack(nn.Module):
    """Equal layers without bias: equal buckets that fill at equal intervals."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack(layers: int = 8, width: int = 100) -> Task:
    """A task whose gradients fill `layers` buckets of 4 * width^2 bytes each."""
    return Task(
        model=lambda: Stack(layers, width), data=lambda rank, ranks, seed: [torch.zeros(2, width)],
        loss=lambda model, x: model(x).square().mean(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip


def paced(ranks: int = 3, steps: int = 6, pace: float = 10.0, mbit: float = 100.0, **rest: Any) -> Experiment:
    """Returns a toy experiment that can be simulated: with a Link and a pace."""
    faults = rest.pop("faults", ())
    link = Link(bandwidth=mbit, latency=rest.pop("latency", 0.0), jitter=rest.pop("jitter", 0.0))
    return experiment(ranks, steps, pace=pace, fabric=Fabric(link=link, faults=faults), **rest)


def rows(run: Run, lane: str, rank: int | None = None, name: str | None = None) -> Any:
    """Returns the spans of a lane, optionally of one rank and one name, in order of their ends."""
    found = run.timeline.spans.rows()
    found = found[found.equal("lane", lane) & (True if rank is None else found.rank == rank)]
    return found if name is None else found[found.equal("name", name)]


def comm(run: Run, rank: int) -> list[tuple[int, str, int]]:
    """Returns (step, name, nbytes) of a rank's collectives and messages, in order of their starts."""
    found = rows(run, "comm", rank)
    found = found[np.argsort(found.t0, kind="stable")]
    return list(zip(found.step.tolist(), found.name.tolist(), found.nbytes.tolist(), strict=True))


def begun(record: Any) -> list[tuple[int, str, int]]:
    """Returns the same tuples from the engine's record."""
    return [(r[0], r[2], r[6]) for r in sorted(record, key=lambda r: r[4]) if r[1] == "comm"]


def samples(run: Run, name: str, rank: int | None = None) -> np.ndarray:
    found = run.timeline.samples.rows()
    return found[found.equal("name", name) & (True if rank is None else found.rank == rank)].value


def seconds(run: Run, rank: int = 0) -> np.ndarray:
    """Returns the duration of each step on a rank: (steps,)."""
    found = rows(run, "step", rank)
    return found.t1 - found.t0


def same(a: Run, b: Run) -> bool:
    """Whether two runs have bit-identical rows."""
    for kind in ("spans", "samples", "marks"):
        x, y = (run.timeline.table(kind).rows().columns for run in (a, b))
        if not all(np.array_equal(x[k], y[k], equal_nan=x[k].dtype.kind == "f") for k in x):
            return False
    return True
