"""Tests a pace that cannot be met, which is reported and withdrawn, and faults that multiply real compute time."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.ranks import Rows, experiment, mse, run, toy
from tests.sim.virtual import paced, rows, seconds
from widgets.views.unmet_requests import UnmetRequests
from workbench import Costs, simulate
from workbench.analysis import list_unheeded
from workbench.engine.collectives.shaping import ComputePace
from workbench.fabric import Fault, Freeze, Link, Noisy, Slow, TransientStraggler
from workbench.fabric.pace import REPORT_FACTOR, Kept, lasts
from workbench.settings import Change
from workbench.sim import Duration
from workbench.strategies import DDP, AsyncServer

LATE = 0.08  # seconds of a real forward here; a pace of 100 ms asks for 0.03


class Busy:
    """A virtual clock that advances when a rank computes or sleeps."""

    def __init__(self) -> None:
        self.t = 0.0
        self.clock = self

    def now(self) -> float:
        return self.t

    def sleep_until(self, t: float) -> None:
        self.t = max(self.t, t)


def made(pace_ms: float, *faults: Fault) -> tuple[ComputePace, Busy]:
    busy = Busy()
    pace = ComputePace(1, busy)  # type: ignore[arg-type]
    pace.seconds, pace.faults = pace_ms * 1e-3, faults
    return pace, busy


def computed(pace: ComputePace, busy: Busy, phase: str, *slices: float) -> float:
    """Returns the duration of a phase that really computes for `slices` seconds, in parts of equal size."""
    began = busy.t
    pace.begin_phase(phase, 0)
    for k, s in enumerate(slices, start=1):
        busy.t += s
        pace.reach_fraction(k / len(slices))
    return busy.t - began


@pytest.mark.parametrize("pace_ms", [0.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("slices", [(0.05,), (0.02, 0.03), (0.005, 0.04, 0.005)])
@pytest.mark.parametrize("factor", [1.0, 2.0, 7.5])
def test_a_phase_lasts_as_paced_or_computed_times_its_faults_factor(pace_ms: float, slices: Any, factor: float) -> None:
    pace, busy = made(pace_ms, Slow(rank=1, factor=factor), Slow(rank=0, factor=3.0))
    took = computed(pace, busy, "forward", *slices)
    asked = pace_ms * 1e-3 * 0.3
    least = lasts(asked, sum(slices), factor)
    slept = max(asked * k / len(slices) - sum(slices[:k]) for k in range(1, len(slices) + 1))
    assert least - 1e-12 <= took <= least + max(slept, 0.0) + 1e-9, "early slices end when they are due, not before"
    if pace_ms in (0.0, 10.0, 1000.0):
        assert took == pytest.approx(least)


def test_slices_of_backward_end_in_proportion_and_a_wait_among_them_does_not_count() -> None:
    pace, busy = made(100.0, Slow(rank=1, factor=2.0))
    pace.begin_phase("backward", 0)
    busy.t += 0.01
    pace.reach_fraction(0.25)
    assert busy.t == pytest.approx(0.03)  # 25 % of 60 ms, twice
    busy.t += 5.0
    pace.exclude_wait(5.0)
    busy.t += 0.2  # more than the pace allows for the whole phase
    pace.reach_fraction(1.0)
    assert busy.t == pytest.approx(5.0 + 2 * 0.21)


def test_a_transient_straggler_multiplies_compute_only_in_the_drawn_steps() -> None:
    fault = TransientStraggler(probability=0.4, factor=3.0)
    pace, busy = made(10.0, fault)
    for step in range(20):
        began = busy.t
        pace.begin_phase("update", step)
        busy.t += 0.02
        pace.reach_fraction(1.0)
        assert busy.t - began == pytest.approx(0.02 * fault.stretch(1, step, "update"))


def sleepy(model: Any, pair: Any) -> Any:
    time.sleep(LATE)
    return mse(model, pair)


def forwards(record: Rows) -> np.ndarray:
    return np.array([r[5] - r[4] for r in record if r[1:3] == ("compute", "forward")])


def test_on_real_ranks_a_slow_rank_is_slow_even_if_the_pace_is_not_met() -> None:
    e = experiment(2, 6, task=toy(loss=sleepy), pace=100.0).set("faults", [Slow(rank=1, factor=3.0)])
    healthy, slow = (forwards(s.record) for s in run(e))
    assert healthy.min() >= LATE and slow.min() >= 3 * LATE, "not 3 x 30 ms, which 80 ms of computing would fill"


def test_an_unmet_pace_is_recorded_once_and_withdrawn_when_met() -> None:
    task = toy(loss=sleepy)
    for s in run(experiment(2, 24, task=task, pace=100.0), Change(12, "pace", 1000.0)):
        said = [(step, json.loads(detail)) for step, _, _, detail in s.record.noted("pace")]
        assert [d["met"] for _, d in said][-2:] == [False, True] and sum(d["met"] for _, d in said) == 1
        late = [d["takes_ms"] for _, d in said[:-1]]  # another time only if the machine became that much slower
        assert all(max(a, b) > REPORT_FACTOR * min(a, b) for a, b in pairwise(late)), late
        assert said[0][1]["text"].startswith("pace not met: compute takes ")
        assert said[0][1]["text"].endswith("the pace asks for 100 ms")
        assert said[0][1]["takes_ms"] > 70 + 1e3 * LATE and said[-1][0] >= 12


def test_the_simulator_reports_an_unmet_pace_from_given_costs() -> None:
    told = Costs(forward=(Duration(LATE),), backward=(Duration(0.0),), update=(Duration(0.0),))
    e = paced(2, 24, pace=100.0)
    simulated = simulate(e, costs=told, changes=[Change(12, "pace", 1000.0)])
    said = [d for _, _, d in simulated.details("pace", 1)]
    assert [d["met"] for d in said] == [False, True]
    assert said[0]["takes_ms"] == pytest.approx(1e3 * LATE + 70)
    assert not simulate(e).details("pace")
    slow = simulate(e.set("faults", [Slow(rank=1, factor=3.0)]), costs=told)
    found = rows(slow, "compute", 1, "forward")
    assert found.t1 - found.t0 == pytest.approx(3 * LATE)


def test_micro_batches_take_a_forward_and_a_backward_each_on_both_hosts() -> None:
    e = experiment(2, 5, strategy=DDP(accumulate=3), pace=20.0)
    assert seconds(simulate(e))[-1] == pytest.approx(3 * 18e-3 + 2e-3)
    (first, _) = run(e)
    assert np.median(forwards(first.record)) >= 6e-3 - 1e-4
    assert len(forwards(first.record)) == 15


def test_the_report_follows_the_pace_and_ignores_single_slow_steps() -> None:
    kept = Kept()
    said = [kept.step(0.1, 0.1, t) for t in (0.1, 0.3, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1)]
    assert said == [None] * 8
    again = [kept.step(0.1, 0.1, 0.25) for _ in range(20)]
    assert [d["takes_ms"] for d in again if d] == [pytest.approx(250)]
    more = [d for d in (kept.step(0.1, 0.1, 0.5) for _ in range(20)) if d]
    assert [d["takes_ms"] for d in more] == [pytest.approx(500)], "anew when it has changed by a quarter"
    another = [d for d in (kept.step(0.2, 0.2, 0.5) for _ in range(20)) if d]
    assert [d["asked_ms"] for d in another] == [pytest.approx(200)], "of another pace it is said anew"
    assert [d["met"] for d in (kept.step(0.43, 0.43, 0.5) for _ in range(20)) if d] == [True]
    assert [d["met"] for d in (kept.step(0.1, 0.1, 0.5) for _ in range(20)) if d] == [False]
    assert kept.step(0.0, 0.0, 0.0) == {"met": True, "text": "no pace is set"}
    assert kept.step(0.0, 0.0, 0.0) is None


@pytest.mark.parametrize(("fault", "why"), [
    (Slow(rank=1, phase="link"), "there is no emulated network"),
    (Slow(rank=1, factor=1.0), "a factor of 1"),
    (TransientStraggler(probability=0.0), "probability 0"),
    (Noisy(spread=0.0), "spread 0"),
    (Freeze(seconds=0.0), "0 s is no pause"),
])  # fmt: skip
def test_a_fault_without_an_effect_is_reported_on_both_hosts(fault: Fault, why: str) -> None:
    e = experiment(2, 8).set("faults", [fault])
    real = [json.loads(detail) for _, _, _, detail in run(e)[0].record.noted("no effect")]
    simulated = [d for _, _, d in simulate(e.set("pace", 5.0)).details("no effect")]
    assert real == simulated and len(real) == 1
    (text,) = real[0]["texts"]
    assert text.startswith(f"{fault} has no effect: ") and why in text


def test_the_report_is_withdrawn_when_the_fault_has_an_effect() -> None:
    e = experiment(2, 12).set("faults", [Slow(rank=1, phase="link")])
    found = simulate(e.set("pace", 5.0), changes=[Change(6, "fabric.link", Link(bandwidth=100.0))])
    assert [(step, len(d["texts"])) for step, _, d in found.details("no effect")] == [(0, 1), (6, 0)]


def test_a_servers_compute_cannot_be_slow() -> None:
    strategy = AsyncServer(servers=1)
    server = next(r for r in range(3) if not strategy.trains(r, 3))
    e = paced(3, 4, strategy=strategy, faults=(Slow(rank=server),))
    (said,) = [d["texts"] for _, _, d in simulate(e).details("no effect")]
    assert "is a server" in said[0]


def test_the_dashboard_shows_an_unmet_pace_and_idle_faults_until_they_end() -> None:
    told = Costs(forward=(Duration(LATE), Duration(0.2)), backward=(Duration(0.0),), update=(Duration(0.0),))
    e = paced(3, 24, pace=100.0, mbit=0.0, faults=(Slow(rank=2, phase="link"),))
    found = simulate(e, costs=told, changes=[Change(12, "pace", 1000.0), Change(12, "fabric.faults", [])])
    view, marks = UnmetRequests(), found.timeline.marks.rows()
    early = type(found)(dict(found.settings), name="early")
    early.timeline.marks.extend(marks[marks.step < 12].columns)
    pace, fault = list_unheeded(early.timeline)
    assert pace.startswith("Pace not met: compute takes 270 ms on rank 1, the pace asks for 100 ms, and 2 more ranks")
    assert fault.startswith("Slow(rank=2, factor=2.0, phase='link') has no effect: ")
    shown = view.update(early).html
    assert shown and "270 ms" in shown and "phase=" in shown
    assert not view.update(early), "nothing new"
    assert list_unheeded(found.timeline) == [] and view.update(found).html == ""
