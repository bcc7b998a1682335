"""Checks that both hosts receive the same operations from a strategy: same order, same bytes.

If a strategy sends the most urgent exchange first, the clock decides which exchanges it can choose from. The operations
of each step and their bytes are then still the same, and every rank has rank 0's order.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.laws.claims import URGENT
from tests.laws.codecs import KINDS
from tests.ranks import experiment, make_fitting, run, shipped
from tests.sim.virtual import begun, comm, rows, samples
from tests.thinned import thinned
from workbench import simulate
from workbench.compressors import Compressor, inside
from workbench.experiment import Experiment
from workbench.settings import Change, KnobError, to_plain
from workbench.strategies import DDP, LocalSGD, Strategy

pytestmark = pytest.mark.ranks

LOCKSTEP = {n: cls for n, cls in shipped(Strategy).items() if cls.lockstep and not cls.opaque}
COMPRESSORS = shipped(Compressor)


def chosen(name: str, compressor: str) -> Experiment | None:
    """Returns an experiment of this pair; None if it cannot train."""
    try:
        strategy, of = make_fitting(LOCKSTEP[name], 3), COMPRESSORS[compressor].usual()
        return experiment(3, 9, strategy=strategy, compressor=of, eval_every=4)
    except KnobError:
        return None


TIED = URGENT | {"HSDP"}  # their first gather and the sum over all ranks begin at second 0 of the virtual clock
WANTED = [(n, c) for n in LOCKSTEP for c in COMPRESSORS if c in KINDS or n in ("DDP", "LocalSGD")]
PAIRS = [pair for pair in WANTED if chosen(*pair)]


def test_most_pairs_can_be_compared() -> None:
    assert {("DDP", c) for c in COMPRESSORS} | {(n, "Dense") for n in LOCKSTEP} <= set(PAIRS)


@pytest.mark.parametrize(("name", "compressor"), thinned(PAIRS, of=10, long=8))
def test_both_hosts_receive_the_same_operations(name: str, compressor: str) -> None:
    e = chosen(name, compressor)
    assert e is not None
    sessions = run(e)
    guessed = any(c.varies for c in inside(e.compressor))  # the bytes depend on values
    for real in (True,) if guessed else (False, True):
        simulated = simulate(e.set("pace", 5.0), real=real)
        for s in sessions:
            if name in TIED:
                assert begun(s.record) == begun(sessions[0].record)
                assert sorted(comm(simulated, s.rank.index)) == sorted(begun(s.record))
            else:
                assert comm(simulated, s.rank.index) == begun(s.record)


@pytest.mark.parametrize(("strategy", "other"), [(DDP(), LocalSGD(every=3)), (LocalSGD(every=3), DDP(accumulate=2))])
def test_both_hosts_receive_the_same_operations_across_changes(strategy: Strategy, other: Strategy) -> None:
    changes = (
        Change(3, "bucket_mb", 0.02), Change(4, "strategy", to_plain(other)),
        Change(6, "compressor", {"TopK": {"density": 0.1}}), Change(8, "compressor", "Dense"),
        Change(10, "strategy", to_plain(strategy)), Change(11, "lr", 0.01),
    )  # fmt: skip
    e = experiment(3, 14, strategy=strategy, eval_every=5)
    sessions = run(e, *changes)
    simulated = simulate(e.set("pace", 5.0), changes=changes, real=True)
    for s in sessions:
        assert comm(simulated, s.rank.index) == begun(s.record)
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-4)
    assert [m[1] for m in sessions[0].record.marks] == [
        name for rank, name in zip(simulated.marks["rank"], simulated.marks["name"], strict=True) if rank == 0
    ]


@pytest.mark.parametrize("strategy", [DDP(), DDP(accumulate=2), LocalSGD(every=3)], ids=str)
def test_with_real_tensors_the_simulators_losses_equal_the_engines(strategy: Strategy) -> None:
    e = experiment(4, 12, strategy=strategy, eval_every=4)
    sessions = run(e)
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in sessions:
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5, atol=1e-6)
    for name in ("held_out", "drift"):
        engine = [v for _, n, _, v in sessions[0].record.samples if n == name]
        np.testing.assert_allclose(samples(simulated, name, 0), engine, rtol=1e-5, atol=1e-6)


def test_both_hosts_write_the_same_kinds_of_rows() -> None:
    e = experiment(2, 6, strategy=DDP(), pace=5.0, eval_every=3).set("fabric.link.bandwidth", 50.0)
    (first, _) = run(e)
    simulated = simulate(e, real=True)
    engine = {(r[1], r[2]) for r in first.record if r[1] != "codec"}
    found = rows(simulated, "step", 0), *(rows(simulated, k, 0) for k in ("compute", "comm", "port", "wait", "eval"))
    assert {(str(k), str(n)) for r in found for k, n in zip(r.lane, r.name, strict=True)} == engine
    assert {n for _, n, _, _ in first.record.samples} - {"cpu_process", "cpu_recording"} == set(
        simulated.timeline.samples.rows().name
    )


def test_paced_on_a_link_both_hosts_take_about_the_same_time() -> None:
    """Compares the least disturbed step, because other load only makes steps longer."""
    e = experiment(3, 10, strategy=DDP(), pace=60.0).set("fabric.link.bandwidth", 5.0)
    steps = rows(simulate(e), "step", 0)
    least = np.inf
    for _ in range(12):
        engine = [r[5] - r[4] for r in run(e)[0].record if r[1] == "step"]
        least = min(least, float((engine / (steps.t1 - steps.t0))[1:].min()))
        if least < 1.15:
            break
    assert least == pytest.approx(1.0, abs=0.15)
