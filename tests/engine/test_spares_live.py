"""Tests a lab's spare engines: warm before they are needed, used first, and replaced."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.harm import Patient
from tests.labs import apart
from tests.waiting import until
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.strategies import DDP
from workbench.tasks import Digits

pytestmark = pytest.mark.engine
BOUND = 120.0  # seconds, on a busy machine


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="spares", spare=1) as made:
            yield made.wait(120)


def spare(lab: Lab) -> list[int]:
    """Returns the ranks of warm, idle spare engines."""
    kept = lab.cluster.spares
    return [rank for rank in kept.list_idle() if rank in kept.warm_ranks]


def loaded(lab: Lab, rank: int) -> list[str]:
    """Returns the modules needed first by a rank that its engine has already loaded."""
    names = ("torch", "workbench.engine.rank.session")
    found: list[str] = lab.cluster.call(lab.cluster.engines[rank].id, lambda: [n for n in names if n in sys.modules])
    return found


def test_a_spare_engine_is_used_first_and_a_new_one_replaces_it(lab: Lab) -> None:
    assert lab.ranks == 2 and lab.experiment.ranks == 2, "a spare one is no rank"
    assert until(lambda: spare(lab) == [2], BOUND), lab.notes
    assert loaded(lab, 2) == ["torch", "workbench.engine.rank.session"]
    e = Experiment(task=Digits(), strategy=DDP(), steps=0, eval_every=25, pace=10.0, on_death="replace").checked()
    run = lab.run(e)
    assert until(lambda: lab._live is not None and lab._live.step >= 10, BOUND), lab.notes
    assert lab.members == (0, 1) and spare(lab) == [2] and len(lab.cluster.engines) == 3
    os.kill(lab.status[1]["pid"], signal.SIGKILL)
    assert until(lambda: lab.members == (0, 2), BOUND), lab.notes
    Patient(lab, None).goes_on("replacement")  # type: ignore[arg-type]
    assert until(lambda: spare(lab) == [3], BOUND), lab.notes
    came = lab.resize(3).wait(BOUND)
    assert came.applied_at is not None and lab.members == (0, 2, 3)
    assert until(lambda: spare(lab) == [4], BOUND), lab.notes
    lab.stop()
    assert run.wait(BOUND).state == "stopped" and not lab.cluster.spares.trouble


def test_a_resize_right_after_the_start_waits_until_the_ranks_train(lab: Lab) -> None:
    run = lab.run(Experiment(task=Digits(), strategy=DDP(), ranks=2, steps=0, eval_every=0, pace=10.0))
    before = len(lab.members)
    assert lab.resize(before - 1).wait(BOUND).applied_at is not None
    assert len(lab.members) == before - 1
    lab.stop()
    assert run.wait(BOUND).state == "stopped"
