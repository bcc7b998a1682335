"""Tests that analyses and views go on with the ranks left after a loss."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.synthetic import Host, Slow
from tests.unit.synthetic import run as recorded
from widgets.controls.progress import RunProgress
from workbench import analysis
from workbench.analysis.steps.window import Window
from workbench.record.timeline import Mark, Timeline
from workbench.run import Run

LOST, STEPS = 20, 60  # the step that was under way; steps in all


def outlived(gone: int, slow: Slow | None = None) -> Run:
    """Records 4 ranks and loses one in a step. The other ranks repeat it, and take half the time from then on."""
    how = {"link": True, "noise": 0.02, "hiccups": 0.0}
    before, after = Host(4, 0.2, seed=1, **how), Host(3, 0.1, seed=2, **how)  # type: ignore[arg-type]
    left = [rank for rank in range(4) if rank != gone]
    for step in range(LOST):
        before.step(step)
    before.compute(LOST, "forward")
    after.now += before.now.max() + 1.0
    detail = {"members": left, "gone": [gone], "step": LOST, "text": "the others went on"}
    mark = Mark(left[0], LOST, "members", float(after.now.min()), json.dumps(detail))
    after.slow = (left.index(slow[0]), *slow[1:]) if slow else None
    for step in range(LOST, STEPS):
        after.step(step)
    tl = Timeline()
    spans = [span._replace(rank=left[span.rank]) for span in after.spans]
    samples = [sample._replace(rank=left[sample.rank]) for sample in after.samples]
    tl.spans.add(sorted((*before.spans, *spans), key=lambda span: span.t1))
    tl.samples.add(sorted((*before.samples, *samples), key=lambda sample: sample.t))
    tl.marks.add([mark])
    return Run(recorded(ranks=4, steps=2, changes=()).settings, timeline=tl, environment={}, name="outlived")


@pytest.mark.parametrize("gone", range(4))
def test_the_newest_steps_are_those_of_the_ranks_left(gone: int) -> None:
    run = outlived(gone)
    found, spans = run.summary(), run.spans
    lasted = spans[(spans.lane == "step") & (spans.step >= LOST)]
    lasts = float((lasted.t1 - lasted.t0).median())
    assert found["steps"] == STEPS and found["step_s"] == pytest.approx(lasts, rel=0.05)
    assert analysis.last_steps(run.timeline, 10) == (STEPS - 10, STEPS)
    assert analysis.last_steps(run.timeline, 50) == (LOST, STEPS), "never across a change of who is there"
    w = Window(run.timeline, LOST, STEPS)
    assert gone not in w.ranks and len(w.ranks) == 3 and w.complete.all()
    whole = Window(run.timeline, 0, STEPS)
    assert len(whole.ranks) == 4 and whole.complete[:LOST].all() and whole.seconds("compute").sum() > 0
    undone = whole.seconds("compute", name="forward")[LOST]
    assert np.allclose(undone, 0.03, atol=0.03) and undone[gone] == 0.0, "what was under way then was for nothing"
    progress = RunProgress().follow_run(run)
    assert progress.step == STEPS - 1 and progress.step_rate == pytest.approx(1 / lasts, rel=0.1)


@pytest.mark.parametrize(("gone", "slow"), [(0, 2), (1, 3), (3, 0)])
def test_a_straggler_among_the_ranks_left_keeps_its_number(gone: int, slow: int) -> None:
    run = outlived(gone, (slow, "forward", 2.5))
    found = analysis.find_straggler(run.timeline)
    assert found is not None and found.rank == slow
    late = analysis.measure_lateness(run.timeline, STEPS - 10)
    assert int(late.ranks[np.nanmean(late.seconds, axis=0).argmax()]) == slow
