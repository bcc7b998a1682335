"""Tests rates and drift of real ranks, as threads of this process: tables of a link and of rounds."""

from __future__ import annotations

import pytest

from tests.ranks import run
from tests.sim.virtual import paced, stack
from widgets.views.drift import Drift
from widgets.views.timeline import Timeline
from workbench.analysis import find_straggler
from workbench.engine.rank.session import Session
from workbench.fabric import Slow
from workbench.record.timeline import Mark, Sample, Span
from workbench.run import Run
from workbench.strategies import LocalSGD

pytestmark = pytest.mark.ranks


def recorded(sessions: list[Session]) -> Run:
    """Returns a run made of the ranks' rows."""
    out = Run(sessions[0].experiment.plain())
    for s in sessions:
        out.timeline.spans.add([Span(s.rank.index, *row) for row in s.record])
        out.timeline.samples.add([Sample(s.rank.index, *row) for row in s.record.samples])
        out.timeline.marks.add([Mark(s.rank.index, step, name, t, detail) for step, name, t, detail in s.record.marks])
    return out


def test_the_table_gives_the_links_rate_however_long_ranks_wait_for_a_late_one() -> None:
    late = (Slow(rank=1, factor=4.0, phase="forward"),)
    wanted = paced(2, 6, 60.0, 40.0, task=stack(2, 300), faults=late, eval_every=0)
    shown, result = Timeline(), recorded(run(wanted))
    shown.update(result)
    shown.ask({"at": 3, "steps": 3})
    shown.update(result)
    grid = shown.table(result)
    rates = [float(r[-1]) for r in grid.rows if r[2] == "comm"]
    spans = result.timeline.spans.rows()
    comm = spans[spans.equal("lane", "comm") & (spans.step >= 3) & (spans.step < 6)]
    assert len(rates) == len(comm) > 0
    assert sorted(rates)[len(rates) // 2] == pytest.approx(40, rel=0.05)
    assert (comm.nbytes * 8e-6 / (comm.t1 - comm.t0)).min() < 30, "waiting and all: rank 0 came early"


def test_drift_is_shown_with_its_position_in_the_round() -> None:
    wanted = paced(2, 21, 1.0, 0.0, task=stack(2, 20), strategy=LocalSGD(every=4), eval_every=6)
    patch = Drift().update(recorded(run(wanted)))
    assert patch.layout["xaxis.title.text"] == "step<br>points: step 0 or 2 of every 4"
    assert patch.append[2]["x"].tolist() == [6, 12, 18]


def test_a_rank_that_is_slow_in_all_phases_is_named_with_compute_as_a_whole() -> None:
    late = (Slow(rank=1, factor=1.8, phase="compute"),)
    wanted = paced(3, 28, 80.0, 100.0, task=stack(3, 200), faults=late, eval_every=0)
    for _ in range(8):  # a machine that stands still for a while may hide it once
        verdict = find_straggler(recorded(run(wanted)).timeline)
        if verdict is not None and verdict.phase == "compute":
            break
    assert verdict is not None and (verdict.rank, verdict.phase) == (1, "compute")
    assert "its compute as a whole (forward, backward and update) takes " in verdict.text
    assert f"{verdict.share * 100:.0f} % of its step's time" in verdict.text
