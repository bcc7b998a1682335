"""Finds stragglers on real ranks with a 20 % delay in each rank's forward, backward and link in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from workbench import Experiment, Lab
from workbench.analysis import find_straggler
from workbench.analysis.steps.window import Window
from workbench.engine.collectives.shaping import ComputePace
from workbench.fabric import Fabric, Link, Slow
from workbench.run import Run
from workbench.tasks import ByteGPT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PACE, WITHIN = 0.16, 20
RANKS = {"forward": (0, 3), "backward": (1, 2), "link": (0, 2)}  # the slow ranks in CI
SILENT = "silent, on a machine that did not keep the pace"  # a silent verdict is no fault, but the test tries again


def beyond(run: Run, step: int) -> None:
    """Waits until every rank has ended `step`."""
    end = time.monotonic() + 120
    while True:
        s = run.timeline.spans.rows()
        ended = s.equal("lane", "step") & (s.step == step)
        if len(set(s.rank[ended].tolist())) == 4:
            return
        assert time.monotonic() < end and run.live, run
        time.sleep(0.05)


def judged(lab: Lab, run: Run, fault: Slow) -> str:
    """Injects the fault again; returns the error in the verdict after twenty steps, or ""."""
    lab.set("faults", []).wait(60)
    change = lab.set("faults", [fault])
    assert change.wait(60) and change.applied_at is not None
    beyond(run, change.applied_at + WITHIN - 1)
    return wrong(run, change.applied_at, fault)


def wrong(run: Run, first: int, fault: Slow | None) -> str:
    """Returns the error in the verdict on the steps from `first` on, or "".

    If the machine kept the pace, the verdict must be the injected fault. If not, the verdict may be silent or name the
    rank that the machine slowed down most.
    """
    said = find_straggler(run.timeline)
    w = Window(run.timeline, first, first + WITHIN)
    found = said and (said.rank, said.side, said.phase)
    wanted = fault and (fault.rank, "link" if fault.phase == "link" else "compute", fault.phase)
    if found == wanted:
        return ""
    if not kept(w, fault):
        slowest = int(np.median((w.step_seconds - w.seconds("wait"))[w.complete], axis=0).argmax())
        if found is None or found[:2] in (wanted and wanted[:2], (slowest, "compute")):
            return SILENT if found is None else ""
    return f"steps {first} to {first + WITHIN}: {wanted} was injected, {found} named"


def kept(w: Window, fault: Slow | None) -> bool:
    """Whether the ranks without a fault kept their pace in 80 % of their forwards."""
    s = w.lane("compute", name="forward")
    s = s[s.rank != fault.rank] if fault else s
    return bool((s.t1 - s.t0 > 1.2 * ComputePace.shares["forward"] * PACE).mean() <= 0.2)


@pytest.mark.parametrize(
    "ranks",
    [RANKS, pytest.param({phase: set(range(4)) - set(some) for phase, some in RANKS.items()}, marks=pytest.mark.every)],
    ids=["two ranks per phase", "the others"],
)
def test_the_right_rank_and_side_are_named_within_twenty_steps(ranks: dict[str, Iterable[int]], tmp_path: Path) -> None:
    wire = 0.6 * PACE  # as long as backward, so that a limited link shows
    mbit = 2 * 3 / 4 * 2.844e6 * 8e-6 / wire
    e = Experiment(task=ByteGPT(), pace=PACE * 1e3, eval_every=0, fabric=Fabric(link=Link(bandwidth=mbit)))
    with Lab(ranks=4, name="straggler") as lab:
        run = lab.run(e, out=tmp_path / "run")
        beyond(run, 3 + WITHIN)
        found = [wrong(run, 4, None)]
        step = 0.2 * (PACE + 0.03)
        factors = {"forward": 1 + step / (0.3 * PACE), "backward": 1 + step / (0.6 * PACE), "link": 1 + step / wire}
        for phase, factor in factors.items():
            for rank in ranks[phase]:
                fault = Slow(rank=rank, factor=factor, phase=phase)
                found.append(judged(lab, run, fault))
                if found[-1] == SILENT:
                    found.append(judged(lab, run, fault))
        lab.set("faults", []).wait(60)
        lab.stop()
        run.wait(60)
    assert not set(found) - {"", SILENT}
