"""Ours: survivors go on, and a new engine takes its state from them; the engine starts cold or waits warm."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.bench.recovering.killing import LIMIT, RANDOMLY, START, waited
from tests.bench.recovering.starting import SIZE
from tests.bench.recovering.training import PACE
from tests.waiting import until
from workbench import Digits, Experiment, Lab, Run


@contextmanager
def lab(spare: int) -> Iterator[Lab]:
    """A training lab of four with `spare` waiting engines."""
    e = Experiment(task=Digits(), ranks=SIZE, steps=0, on_death="replace", eval_every=0, pace=1000 * PACE)
    with Lab(ranks=SIZE, name=f"recovering-{os.getpid()}-{time.time_ns()}", spare=spare) as found:
        found.wait(START)
        found.run(e)
        yield found
        found.abort()


def kill(lab: Lab, rng: random.Random) -> dict[str, Any]:
    """Kills the engine of one of four ranks, and waits until four make steps again.

    All times come from the ranks' records, except the notice: either a note of the lab or the survivors' agreement.
    """
    if not waited(lambda: _ready(lab), START):
        return {"never": "four did not train together"}
    time.sleep(rng.uniform(*RANDOMLY))
    live, known = lab._live, len(lab.notes)
    assert live is not None
    run, victim = live.run, rng.choice(sorted(live.members))
    began = time.time()
    os.kill(lab.status[victim]["pid"], signal.SIGKILL)
    said = time.time() - began if until(lambda: len(lab.notes) > known, LIMIT) else LIMIT
    waited(lambda: not lab.live or measured(run, began - run.epoch)["full"], LIMIT)
    found = measured(run, began - run.epoch)
    noticed = min(said, found["noticed"] or LIMIT)
    return {**found, "noticed": noticed if noticed < LIMIT else None, "load": os.getloadavg()[0]}


def measured(run: Run, began: float) -> dict[str, Any]:
    """Returns seconds from a kill at `began`, by the run's clock, and the number of repeated steps.

    The seconds last until survivors agreed, until a step of a new group, and until a full group.
    """
    out: dict[str, Any] = dict.fromkeys(("noticed", "on", "full", "again"))
    spans = run.timeline.spans.rows()
    steps = spans[spans.equal("lane", "step") & (spans.t0 > began)]
    for _, t, said in run.details("members"):
        if t < began or "members" not in said:
            continue
        if out["noticed"] is None:
            out["noticed"] = t - began
        firsts = [steps.t1[(steps.rank == rank) & (steps.t0 > t)] for rank in said["members"]]
        if all(len(ends) for ends in firsts):
            made = float(max(ends.min() for ends in firsts)) - began
            if out["on"] is None:
                out |= {"on": made, "again": said.get("back", 0)}
            if len(said["members"]) == SIZE:
                return out | {"full": made}
    return out


def _ready(lab: Lab) -> bool:
    """Whether four ranks train and the waiting engines are warm."""
    live, spares = lab._live, lab.cluster.spares
    warm = spares.warm_ranks.intersection(spares.list_idle())
    return live is not None and live.step > 3 and len(live.members) == SIZE and len(warm) >= spares.count
