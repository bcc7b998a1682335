"""Tests ranks that stand still on real engines: reports name the rank, its phase and the outcome.

One lab serves all tests of this file, because a start takes seconds. The kills come last: they cost engines.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from tests.labs import apart
from tests.waiting import until
from workbench import lab as lab_module
from workbench.cluster.api import launch
from workbench.cluster.observe import hang_diagnosis
from workbench.cluster.processes.lab_place import ClusterError
from workbench.experiment import Experiment
from workbench.lab import Lab, RankError
from workbench.run import Run
from workbench.strategies import AsyncServer
from workbench.tasks import Task

pytestmark = pytest.mark.engine
LEAST = 5.0  # seconds of silence here: half the default, so these tests take half as long
BOUND = 120.0  # seconds within which the lab must name a rank, on a busy machine


def model() -> nn.Module:
    return nn.Linear(8, 2)


def rank_here() -> int:
    return int(os.environ["SILENCE_RANK"])


class Source:
    """An endless source of batches. On rank 1 the iterator hangs while the file `stuck` exists."""

    def __init__(self, rank: int, stuck: str) -> None:
        self.rank, self.stuck = rank, stuck

    def __iter__(self) -> Iterator[Any]:
        os.environ["SILENCE_RANK"] = str(self.rank)
        while True:
            while self.rank == 1 and os.path.exists(self.stuck):
                time.sleep(0.05)
            time.sleep(0.02)
            yield torch.randn(4, 8), torch.randint(0, 2, (4,))


def task(stuck: Path, dreams: Path, dies: int = -1) -> Task:
    """A task: rank 1's iterator hangs while `stuck` exists, rank 2's loss sleeps while `dreams` exists.

    Rank 3 dies in step `dies`.
    """
    steps = iter(range(10**9))

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        if rank_here() == 3 and next(steps) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while rank_here() == 2 and os.path.exists(dreams):
            time.sleep(0.05)
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    return Task(model=model, data=lambda rank, ranks, seed: Source(rank, str(stuck)), loss=loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.01))  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as if this were a notebook
    with apart(tmp_path_factory) as patch:
        patch.setattr(hang_diagnosis, "MIN_STALL", LEAST)
        with Lab(ranks=4, name="silence") as made:
            yield made.wait(120)
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "stuck", tmp_path / "dreams"


@pytest.fixture(autouse=True)
def _idle(lab: Lab, files: tuple[Path, Path]) -> Iterator[None]:
    yield
    for file in files:
        file.unlink(missing_ok=True)
    if lab.live:
        lab.abort()
        assert until(lambda: not lab.live)


def running(lab: Lab, experiment: Experiment, out: Path | None = None) -> Run:
    run = lab.run(experiment, out=out)
    assert until(lambda: (lab.state == "running" and (lab.status[0]["step"] or 0) > 2) or not lab.live), lab.notes
    return run


def named(lab: Lab, rank: int) -> str:
    """Waits for a note that names `rank` and returns it."""

    def found() -> list[str]:
        return [n for n in lab.notes if n.startswith(f"rank {rank} has ")]

    assert until(found, BOUND), (lab.notes, lab.status)
    return found()[0]


def test_a_frozen_rank_is_named_and_its_freeze_is_recorded(lab: Lab, files: tuple[Path, Path]) -> None:
    run = running(lab, Experiment(task=task(*files), eval_every=0))  # otherwise some ranks may wait in an evaluation
    pid = lab.status[2]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        note = named(lab, 2)
        assert note.startswith("rank 2 has said nothing for ") and "0, 1, 3 wait in " in note
        assert "rank 2 has said nothing" in repr(run) and "rank 2 has said nothing" in repr(lab) and lab.run_now.holdup
    finally:
        os.kill(pid, signal.SIGCONT)
    assert until(lambda: run.details("stood still", 2))
    detail = run.details("stood still", 2)[0][2]
    assert detail["seconds"] > 0.8 * LEAST and not detail["machine"]
    step = lab.status[0]["step"]
    assert until(lambda: lab.status[0]["step"] > step + 3)
    assert until(lambda: any(n.startswith("rank 2 stood still for ") for n in lab.notes)), lab.notes
    assert not [n for n in lab.notes if "has said nothing" in n]
    assert until(lambda: not lab.run_now.holdup), "the status line takes it back at its next look"


def test_a_hanging_iterator_and_a_sleeping_loss_are_reported_with_their_phases(lab: Lab, files: Any) -> None:
    stuck, dreams = files
    running(lab, Experiment(task=task(*files)))
    stuck.touch()
    note = named(lab, 1)
    assert note.startswith("rank 1 has been in its data iterator of step ") and "; 0, 2, 3 wait in " in note
    stuck.unlink()
    assert until(lambda: any("rank 1 stood still for" in n and "went on" in n for n in lab.notes)), lab.notes
    dreams.touch()
    note = named(lab, 2)
    assert note.startswith("rank 2 has been in forward of step ") and "; 0, 1, 3 wait in " in note


def test_without_lockstep_a_still_rank_is_named_while_the_others_go_on(lab: Lab, files: Any) -> None:
    running(lab, Experiment(task=task(*files), strategy=AsyncServer()))
    files[1].touch()
    assert named(lab, 2).startswith("rank 2 has been in forward of step ")
    assert until(lambda: "; 0, 1, 3 go on" in lab.run_now.holdup, BOUND), (lab.run_now.holdup, lab.status)
    lab.set("lr", 0.02)  # all ranks must meet for this change, so each waiting rank is a victim
    waits = "; 0, 1, 3 wait in "
    assert until(lambda: waits in lab.run_now.holdup, BOUND), (lab.run_now.holdup, lab.status)


def test_a_pause_is_not_reported_as_a_hang(lab: Lab, files: Any) -> None:
    running(lab, Experiment(task=task(*files)))
    lab.pause()
    assert until(lambda: lab.state == "paused")
    time.sleep(LEAST + 2.0)
    assert lab.notes == [] and not lab.run_now.holdup
    lab.resume()
    time.sleep(2.0)
    assert lab.notes == [] and lab.state == "running"


def test_a_run_on_a_full_disk_raises_a_clear_error(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Run, path: Any = None) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launch.Run, "save", full)
    with pytest.raises(ClusterError, match=r"nothing can be recorded in .*: No space left on device; make room, or"):
        lab.run(Experiment(steps=3))
    assert not lab.live


def test_a_rank_that_dies_in_a_step_is_reported_with_that_step(lab: Lab, files: Any) -> None:
    with pytest.raises(RankError) as caught:
        lab.run(Experiment(task=task(*files, dies=5))).wait(60)
    assert (caught.value.rank, caught.value.step, caught.value.type) == (3, 5, "EngineDied")
    assert caught.value.freed == [0, 1, 2]
    assert repr(lab.set("lr", 0.02).wait(0)).endswith("kept for the next run") and lab.state == "failed"


def test_a_change_on_a_closed_lab_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = SimpleNamespace(name="gone", ranks=2, closed=True, error=None, ready=False, close=lambda: None)
    engines.start, engines.spares = lambda: engines, SimpleNamespace(list_used_ranks=None)
    monkeypatch.setattr(lab_module, "Cluster", lambda *asked: engines)
    closed = Lab(2, name="gone")
    with pytest.raises(ClusterError, match="lab 'gone' is closed; create it again"):
        closed.set("lr", 0.1)
    engines.error = ClusterError("engine 1 ended with code 1")
    with pytest.raises(ClusterError, match=r"lr: lab 'gone' has no engines, lab.run\(\) starts them again; engine 1"):
        closed.set("lr", 0.1)
    closed.close()
    assert closed.changes == []
