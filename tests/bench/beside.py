"""Runs each strategy once on paced real ranks, to compare with torch's DDP and with its own simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tests.bench.cells import RANKS, TASK, fabric
from tests.bench.methods import LINK, Method
from workbench import simulate
from workbench.compressors import Compressor, Dense
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.sim import Costs
from workbench.strategies import DDP, Strategy, TorchDDP

PACE, SETTLE, COUNTED = 120.0, 4, 24  # ms; steps before counting, counted steps
BASE = Experiment(
    task=TASK, ranks=RANKS, pace=PACE, eval_every=0, steps=SETTLE + COUNTED, fabric=fabric(LINK, 0),
)  # fmt: skip


def measured(wanted: list[tuple[str, Method | None, Mapping[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (row, results) of each method; None means torch's own. DDP runs first because it provides the costs."""
    with Lab(ranks=RANKS, name="beside") as lab:
        costs = Costs.measured(_ran(lab, DDP(), Dense()))
        for row, method, knobs in wanted:
            try:
                strategy: Strategy = TorchDDP() if method is None else method.strategy(knobs)
                codec = method.codec() if method else Dense()
                expected = replace(BASE, strategy=DDP() if strategy.opaque else strategy, compressor=codec)
                simulated = simulate(expected, costs=costs, real=method is not None and method.real)
                found = {"step_s": seconds(_ran(lab, strategy, codec)), "simulated_s": seconds(simulated)}
            except Exception as error:  # a strategy that fails must not stop the next ones
                print(f"{row} failed on real ranks: {error}", flush=True)
                continue
            yield row, {**found, "pace": PACE, "steps": COUNTED, "link": LINK}


def _ran(lab: Lab, strategy: Strategy, codec: Compressor) -> Run:
    run = lab.run(replace(BASE, strategy=strategy, compressor=codec))
    run.wait(120)
    if run.state != "done":
        raise RuntimeError(f"{strategy} ended as {run.state}")
    return run


def seconds(run: Run) -> float:
    """Returns the mean step of training ranks after step SETTLE, including the time between steps."""
    spans = run.timeline.spans.rows()
    steps = spans[spans.equal("lane", "step") & (spans.step >= SETTLE)]
    each = [steps[steps.rank == r] for r in np.unique(steps.rank)]
    return float(np.mean([(rows.t1.max() - rows.t0.min()) / len(rows) for rows in each]))
