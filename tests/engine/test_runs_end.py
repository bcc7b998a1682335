"""Checks that runs end: forty short ones of every kind, then known causes of hangs and false failures.

One lab of real ranks serves all tests. The tests that cost it an engine or its controller come last.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from tests import runs_end
from tests.labs import apart
from tests.ranks import mse, toy
from tests.waiting import until
from workbench.cluster.run import run_ending
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.settings import KnobError
from workbench.strategies import DDP, LocalSGD

pytestmark = pytest.mark.engine
SEED, RUNS = 20, 40


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = [sys.modules[__name__], runs_end]
    for module in here:
        cloudpickle.register_pickle_by_value(module)  # as if this were a notebook
    with apart(tmp_path_factory):
        with Lab(ranks=4, name="ends") as made:
            yield made.wait(120)
    for module in here:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(autouse=True)
def _idle(lab: Lab) -> Iterator[None]:
    yield
    if lab.live:
        lab.stop()
        assert until(lambda: not lab.live), lab.notes


def naps(seconds: tuple[float, ...], net: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A loss that takes `seconds[r]` on rank r."""
    rank = int(threading.current_thread().name.split()[1])
    time.sleep(seconds[rank % len(seconds)])
    return mse(net, batch)


def sleepy(*seconds: float, ranks: int = 2, **rest: Any) -> Experiment:
    return Experiment(task=toy(loss=partial(naps, seconds)), ranks=ranks, eval_every=0, bucket_mb=0.01, **rest)


def at_step(lab: Lab, step: int) -> bool:
    return until(lambda: not lab.live or all((row["step"] or 0) >= step for row in lab.status[:2]))


def test_the_mix_of_runs_depends_on_its_seed_alone() -> None:
    assert runs_end.kinds(SEED, RUNS, 4) == runs_end.kinds(SEED, RUNS, 4) != runs_end.kinds(SEED + 1, RUNS, 4)
    assert {kind.what for kind in runs_end.kinds(SEED, RUNS, 4)} == {"done", "stop", "nan", "raise"}


@pytest.mark.long
def test_forty_short_runs_all_end_in_the_right_state(lab: Lab) -> None:
    found = runs_end.play(lab, SEED, RUNS)
    assert not found["wrong"] and sum(found["ended"].values()) == RUNS


def test_stopping_ranks_of_unequal_speed_is_never_a_failure(lab: Lab) -> None:
    for _ in range(3):
        run = lab.run(sleepy(0.02, 0.3, strategy=LocalSGD(every=6)))
        assert at_step(lab, 1)
        lab.stop()
        assert run.wait(60).state == "stopped", lab.notes
        assert not run.details("error")
        ends = [detail["state"] for _, _, detail in run.details("end")]
        assert ends == ["stopped"] * 2


def test_steps_of_two_seconds_end_at_a_boundary(lab: Lab) -> None:
    run = lab.run(sleepy(2.0, 2.0, strategy=DDP()))
    assert at_step(lab, 1)
    time.sleep(0.3)
    lab.stop()
    assert run.wait(60).state == "stopped"
    assert "in the middle" not in run.details("state")[-1][2]["detail"]
    steps = run.spans[run.spans["lane"] == "step"].groupby("rank").step.max()
    assert steps[0] == steps[1] >= 1, "both ranks made the same steps, and made them whole"


def test_stopping_a_run_before_its_first_step_costs_no_engine(lab: Lab) -> None:
    pids = [row["pid"] for row in lab.status]
    for wait in (0.0, 0.02, 0.1):
        run = lab.run(sleepy(0.0, 0.0))
        time.sleep(wait)
        lab.stop()
        assert run.wait(60).state == "stopped" == type(run).open(run.path).state
    assert [row["pid"] for row in lab.status] == pids and lab.cluster.is_healthy


def test_a_rank_whose_line_is_dead_does_not_keep_a_run_from_ending(lab: Lab) -> None:
    for steps, state in ((60, "done"), (0, "stopped")):
        run = lab.run(sleepy(0.05, 0.05, steps=steps))
        assert at_step(lab, 1)
        lab.view.apply_sync(deafen, 1)
        try:
            if state == "stopped":
                lab.stop()
            assert run.wait(60).state == state, lab.notes
        finally:
            lab.view.apply_sync(deafen, None)
        made = run.spans[(run.spans["rank"] == 1) & (run.spans["lane"] == "step")]
        assert list(made.step) == list(range(len(made))) and len(made) >= steps, "its rows came all the same"


def deafen(rank: int | None) -> None:
    """Runs on an engine: the connection of `rank` accepts requests and never answers; None: it answers again."""
    from workbench.cluster.engines import engine_server

    bench = engine_server._server
    vars(bench).pop("_make_reply", None)
    if bench.session_arguments.get("rank") == rank:
        bench._make_reply = lambda ask, blob: [b'{"number": -2}', b""]


def test_a_rank_that_is_frozen_is_named_and_its_engine_replaced_when_a_run_is_stopped(lab: Lab) -> None:
    run = lab.run(sleepy(0.01, 0.01))
    assert at_step(lab, 3)
    frozen = lab.status[1]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(0.5)
    assert run_ending.MAX_STEP_WAIT + run_ending.LEAVE_TIMEOUT < 30, "the bound that stop() states"
    lab.stop()
    assert run.wait(120).state == "stopped"
    (note,) = [n for n in lab.notes if "its engine was ended" in n]
    assert note.startswith("rank 1 does not answer: it was at step") and "the next run gets new ones" in note
    assert not psutil.pid_exists(frozen) or psutil.Process(frozen).status() == psutil.STATUS_ZOMBIE
    again = lab.run(sleepy(0.0, 0.0, steps=3))
    assert again.wait(120).state == "done" and frozen not in [row["pid"] for row in lab.status]


def test_a_dead_controller_is_reported_and_replaced_at_the_next_run(lab: Lab) -> None:
    run = lab.run(sleepy(0.01, 0.01))
    assert at_step(lab, 2)
    (controller,) = [p[0] for p in lab.cluster.place.state["processes"] if p[2] == "controller"]
    psutil.Process(controller).kill()
    assert until(lambda: not lab.cluster.is_healthy)
    assert any(f"the controller (pid {controller}) ended with signal SIGKILL" in note for note in lab.notes)
    step = lab.status[0]["step"]
    assert until(lambda: lab.status[0]["step"] > step + 5), "training goes on"
    lab.set("bucket_mb", 0.02).wait(60)
    with pytest.raises(KnobError, match=f"ranks=3: .* the controller \\(pid {controller}\\) ended .* at most 2"):
        lab.resize(3)
    assert lab.resize(1).wait(60).applied_at is not None, "who is there may leave"
    lab.stop()
    assert run.wait(60).state == "stopped"
    assert lab.run(sleepy(0.0, 0.0, steps=3)).wait(120).state == "done", lab.notes
    assert lab.cluster.is_healthy and not any("controller" in note for note in lab.notes)
