"""Tests transient stragglers: the requested frequency, separate steps per rank, reproducible by seed."""

from __future__ import annotations

import pytest

from tests.sim.virtual import paced, rows
from tests.unit.test_pace import made
from workbench import simulate
from workbench.fabric import TransientStraggler
from workbench.settings import KnobError
from workbench.strategies import LocalSGD

STEPS = 2000


def slow_steps(fault: TransientStraggler, rank: int) -> set[int]:
    return {s for s in range(STEPS) if fault.stretch(rank, s, "forward") > 1}


def test_10_percent_of_the_steps_are_five_times_as_long_in_every_phase() -> None:
    fault = TransientStraggler()
    slow = slow_steps(fault, 0)
    assert len(slow) / STEPS == pytest.approx(0.1, abs=0.02)
    for phase in ("forward", "backward", "update"):
        assert {fault.stretch(0, s, phase) for s in range(STEPS)} == {1.0, 5.0}
        assert {s for s in range(STEPS) if fault.stretch(0, s, phase) == 5.0} == slow


def test_slow_steps_differ_by_rank_and_follow_from_the_seed() -> None:
    fault = TransientStraggler()
    assert slow_steps(fault, 0) == slow_steps(TransientStraggler(), 0) != slow_steps(fault, 1)
    assert slow_steps(TransientStraggler(seed=1), 0) != slow_steps(fault, 0)
    both = slow_steps(fault, 0) & slow_steps(fault, 1)
    assert len(both) / STEPS == pytest.approx(0.01, abs=0.008)


def test_one_rank_alone_can_be_slow_with_probability_0_or_1() -> None:
    fault = TransientStraggler(rank=2, probability=1.0, factor=3.0)
    assert [fault.stretch(r, 0, "update") for r in range(4)] == [1.0, 1.0, 3.0, 1.0]
    assert not slow_steps(TransientStraggler(probability=0.0), 0)


def test_a_fault_of_a_missing_rank_raises_knob_error() -> None:
    with pytest.raises(KnobError, match="rank=7: there are ranks 0 to 2"):
        paced(faults=(TransientStraggler(rank=7),)).checked()


def test_the_simulator_stretches_those_steps_and_no_others() -> None:
    fault = TransientStraggler(probability=0.3, factor=4.0, seed=3)
    run = simulate(paced(3, 20, pace=10.0, faults=(fault,), strategy=LocalSGD(every=20)))
    for rank in range(3):
        forward = rows(run, "compute", rank, "forward")
        lasted = dict(zip(forward.step.tolist(), (forward.t1 - forward.t0).tolist(), strict=True))
        assert lasted == {s: pytest.approx(3e-3 * fault.stretch(rank, s, "forward")) for s in range(20)}
        assert len({round(t, 9) for t in lasted.values()}) == 2


def test_the_engine_stretches_the_same_steps() -> None:
    fault = TransientStraggler(probability=0.3, factor=4.0, seed=3)
    pace, clock = made(10.0, fault)
    for step in range(20):
        began = clock.now()
        pace.begin_phase("forward", step)
        pace.reach_fraction(1.0)
        assert clock.now() - began == pytest.approx(3e-3 * fault.stretch(1, step, "forward"))
