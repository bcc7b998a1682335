"""Tests the recorded examples of a step, and the examples per second."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import experiment, run
from tests.sim.virtual import samples
from workbench import simulate
from workbench.analysis import examples_per_second
from workbench.fabric import Fabric, Slow
from workbench.settings import Change
from workbench.strategies import DDP, ShadowMA, ShadowSync
from workbench.tasks import ClickThrough


def made(strategy: Any, ranks: int = 3, real: bool = False, **rest: Any) -> Any:
    task = ClickThrough(fields=2, ids=50, width=2, hidden=4)
    e = experiment(ranks, 6, task=task, batch=8, strategy=strategy, pace=10.0, bucket_mb=1, **rest)
    return simulate(e, real=real)


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize(("accumulate", "each"), [(1, 8), (2, 16)])
def test_a_step_counts_the_examples_of_all_its_batches(accumulate: int, each: int, real: bool) -> None:
    done = made(DDP(accumulate=accumulate), real=real)
    assert [samples(done, "examples", r).tolist() for r in range(3)] == [[each]] * 3, "said once"
    found = done.summary()["examples_per_second"]
    assert found == pytest.approx(3 * each / done.summary()["step_s"], rel=0.05)


def test_ranks_of_different_pace_count_by_their_own_time() -> None:
    slow = Fabric(faults=(Slow(rank=1, factor=2.0),))
    even, odd = (examples_per_second(made(ShadowMA(), ranks=2, fabric=f).timeline, 0, 6) for f in (Fabric(), slow))
    assert odd == pytest.approx(0.75 * even, rel=0.01), "one of two takes twice as long"


def test_servers_count_no_examples_and_each_worker_a_batch() -> None:
    done = made(ShadowSync(servers=1, workers=2), real=True)
    assert [samples(done, "examples", r).tolist() for r in range(3)] == [[16], [16], []]
    assert done.summary()["examples_per_second"] == pytest.approx(2 * 16 / 0.01, rel=0.05), "10 ms are the step's pace"
    assert done.summary()["steps"] == 6 and ", 6 steps in" in repr(done), "of those that train"
    assert done.summary()["step_s"] == pytest.approx(0.01, rel=0.05) and done.summary()["loss"] is not None


def test_a_rank_that_becomes_a_server_counts_no_more_examples() -> None:
    task = ClickThrough(fields=2, ids=50, width=2, hidden=4)
    e = experiment(2, 80, task=task, batch=8, strategy=DDP(), pace=10.0, bucket_mb=1)
    done = simulate(e, changes=[Change(10, "strategy", ShadowSync())])
    assert done.summary()["examples_per_second"] == pytest.approx(8 / 0.01, rel=0.05)
    assert done.summary()["steps"] == 80


@pytest.mark.ranks
def test_the_engine_records_the_same_examples() -> None:
    e = experiment(2, 4, task=ClickThrough(fields=2, ids=50, width=2, hidden=4), batch=8, bucket_mb=1)
    for session in run(e):
        assert [value for _, name, _, value in session.record.samples if name == "examples"] == [8]


def test_a_record_without_examples_has_no_rate() -> None:
    assert simulate(experiment(2, 3, pace=5.0)).summary()["examples_per_second"] is None, "its data makes the batches"
