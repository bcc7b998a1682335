"""Who is slow, on real ranks: a fifth of a step injected into each rank's forward, backward and link in turn."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workbench import Experiment, Lab
from workbench.analysis import straggler
from workbench.engine.shaping import Pace
from workbench.fabric import Fabric, Link, Slow
from workbench.run import Run
from workbench.tasks import ByteGPT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
PACE, WITHIN = 0.16, 20


def beyond(run: Run, step: int) -> None:
    """Waits until every rank has ended `step`."""
    end = time.monotonic() + 60
    while True:
        s = run.timeline.spans.rows()
        ended = s.equal("lane", "step") & (s.step == step)
        if len(set(s.rank[ended].tolist())) == 4:
            return
        assert time.monotonic() < end and run.live, run
        time.sleep(0.05)


def named(lab: Lab, run: Run, fault: Slow) -> tuple[int, str, str] | None:
    """Who is named twenty steps after the fault was injected anew."""
    lab.turn("faults", []).wait(20)
    turn = lab.turn("faults", [fault])
    assert turn.wait(20) and turn.applied_at is not None
    beyond(run, turn.applied_at + WITHIN - 1)
    said = straggler(run.timeline)
    return said and (said.rank, said.side, said.phase)


def overrun(run: Run, injected: int) -> bool:
    """Did ranks that nothing was injected into miss their pace in a fifth of the last steps' forwards?"""
    s = run.timeline.spans.rows()
    at = s.equal("name", "forward") & (s.rank != injected) & (s.step > s.step.max() - WITHIN)
    return bool(((s.t1 - s.t0)[at] > 1.2 * Pace.shares["forward"] * PACE).mean() > 0.2)


def expected(fault: Slow) -> tuple[int, str, str]:
    return fault.rank, "link" if fault.phase == "link" else "compute", fault.phase


def test_the_right_rank_and_side_are_named_within_twenty_steps(tmp_path: Path) -> None:
    wire = 0.6 * PACE  # as long as backward, so that a choked link shows
    mbit = 2 * 3 / 4 * 2.844e6 * 8e-6 / wire
    e = Experiment(task=ByteGPT(), pace=PACE * 1e3, eval_every=0, fabric=Fabric(link=Link(bandwidth=mbit)))
    with Lab(ranks=4, name="straggler") as lab:
        run = lab.run(e, out=tmp_path / "run")
        beyond(run, 3 + WITHIN)
        assert straggler(run.timeline) is None, "nothing is injected"
        step = 0.2 * (PACE + 0.03)
        factors = {"forward": 1 + step / (0.3 * PACE), "backward": 1 + step / (0.6 * PACE), "link": 1 + step / wire}
        wrong = []
        for phase, factor in factors.items():
            for rank in range(4):
                fault = Slow(rank=rank, factor=factor, phase=phase)
                said = named(lab, run, fault)
                for _ in range(2):  # a window in which the machine could not keep the pace proves nothing
                    if said != expected(fault) and overrun(run, fault.rank):
                        said = named(lab, run, fault)
                if said != expected(fault):
                    wrong.append((fault, said))
        lab.turn("faults", []).wait(20)
        lab.stop()
        run.wait(20)
    assert not wrong
