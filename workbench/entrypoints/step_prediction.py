"""Predicts a step's cost from the experiment alone."""

from __future__ import annotations

from typing import NamedTuple

from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.sim import simulate


class StepPrediction(NamedTuple):
    """A step's parts by its description: milliseconds of requested compute and of communication."""

    compute: int
    wire: int
    sent: float  # MB per rank
    messages: int  # consecutive, over all buckets


def predict_step(experiment: Experiment) -> StepPrediction:
    """Simulates a step of `experiment`, which has a pace and a Link, and returns its parts."""
    run = simulate(experiment.set("steps", 3).set("eval_every", 0).set("policy", None))
    rows = run.timeline.spans.rows()
    rows = rows[(rows.rank == 0) & (rows.step == 2)]
    port, comm = rows[rows.equal("lane", "port")], rows[rows.equal("lane", "comm")]
    compute = rows[rows.equal("lane", "compute")]
    messages = sum(traffic(str(name).split(" ", 1)[0], 0, experiment.ranks)[1] for name in comm.name)
    took = [float((part.t1 - part.t0).sum()) * 1e3 for part in (compute, port)]
    return StepPrediction(round(took[0]), round(took[1]), round(float(comm.nbytes.sum()) * 1e-6, 1), messages)
