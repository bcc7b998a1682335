"""Checks that a run leaves nothing in the lab's processes that affects a later run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import workbench
from tests.labs import BOUND, apart
from tests.waiting import until
from workbench.experiment import Experiment
from workbench.lab import Lab, RankError
from workbench.run import Run
from workbench.strategies import DDP, TorchDDP
from workbench.tasks import Loop, Script, Task

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="fresh") as made:
            yield made.wait(BOUND)


def workers(lab: Lab) -> list[int]:
    """Returns the process ids of the engines' children."""
    return [child.pid for row in lab.status for child in psutil.Process(row["pid"]).children()]


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def by_workers(persistent: bool) -> Task:
    """A task that reads with 2 workers on each rank."""

    def data(rank: int, ranks: int, seed: int) -> Any:
        return DataLoader(rows(), 4, num_workers=2, persistent_workers=persistent)

    return Task(
        model=lambda: nn.Linear(4, 1), data=data, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip


def loop() -> None:
    """A user's loop that leaves its data loader's workers running."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), 4, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for x, y in workbench.steps(loader, model):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("task", [by_workers(False), by_workers(True), Loop(run=loop)], ids=["new", "kept", "loop"])
def test_workers_of_a_data_loader_end_with_the_run(lab: Lab, task: Any) -> None:
    steps = 20 if isinstance(task, Task) else 0
    run = lab.run(Experiment(task=task, ranks=2, strategy=DDP(), steps=steps, eval_every=0, pace=20.0))
    if isinstance(task, Task):
        assert until(lambda: len(workers(lab)) == 4 or not lab.live, BOUND)
        assert lab.live, "the workers are seen while it trains"
    assert run.wait(BOUND).state == "done"
    assert workers(lab) == []


def test_a_process_that_a_cell_starts_while_a_run_trains_outlives_the_run(lab: Lab) -> None:
    def start() -> None:
        import multiprocessing
        import time

        process = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        globals()["of_a_cell"] = process

    def end() -> bool:
        process = globals().pop("of_a_cell")
        alive = bool(process.is_alive())
        process.kill()
        process.join()
        return alive

    run = lab.run(Experiment(task=by_workers(False), ranks=2, strategy=DDP(), steps=20, eval_every=0, pace=20.0))
    assert until(lambda: lab.state == "running", BOUND)
    lab.view.apply_sync(start)
    assert run.wait(BOUND).state == "done"
    assert len(workers(lab)) == 2
    assert lab.view.apply_sync(end) == [True, True]


FIRST = """
import atexit, os, random, threading, time, sys
import torch, torch.distributed as dist
import beside
torch.set_default_dtype(torch.float64)
torch.manual_seed(1234), random.seed(1234)
os.environ["LEFT_BEHIND"] = "yes"
beside.state["left"] = "yes"
threading.Thread(target=time.sleep, args=(600,), daemon=True, name="left behind").start()
if sys.argv[1:] == ["fails"]:
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    raise ValueError("in set-up")
"""
LATER = """
import os, random, threading
import torch, torch.distributed as dist
import beside
seen = {"dtype": str(torch.get_default_dtype()), "environment": os.environ.get("LEFT_BEHIND"),
        "module": beside.state.get("left"), "group": dist.is_initialized(), "seed": torch.initial_seed() == 1234,
        "thread": "left behind" in [thread.name for thread in threading.enumerate()]}
print("SEEN", seen, flush=True)
"""
TRAINS = """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step(), optimizer.zero_grad()
"""
NOTHING = ("{'dtype': 'torch.float32', 'environment': None, 'module': None, 'group': False, 'seed': False, "
           "'thread': False}")  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Experiment]:
    """Returns a function that writes a script below `tmp_path` and makes an experiment of it."""
    (tmp_path / "beside.py").write_text("state = {}\n")

    def made(text: str, *args: str) -> Experiment:
        (tmp_path / "train.py").write_text(text)
        task = Script(file="train.py", args=args, folder=str(tmp_path))
        return Experiment(task=task, ranks=2, strategy=TorchDDP(), eval_every=0)

    return made


def said(run: Run) -> list[str]:
    """Returns what the ranks printed after SEEN."""
    return [line["text"][5:] for _, _, line in run.details("log") if line["text"].startswith("SEEN")]


def pids(lab: Lab) -> list[int]:
    return [row["pid"] for row in lab.status]


def test_a_script_sees_no_state_of_the_script_before_it(lab: Lab, script: Callable[..., Experiment]) -> None:
    assert lab.run(script(FIRST + TRAINS)).wait(BOUND).state == "done"
    before = pids(lab)
    run = lab.run(script(LATER + TRAINS)).wait(BOUND)
    assert run.state == "done" and said(run) == [NOTHING] * 2
    assert not {*before} & {*pids(lab)}


def test_a_script_that_fails_in_set_up_leaves_no_process_group_to_the_next(
    lab: Lab, script: Callable[..., Experiment]
) -> None:
    with pytest.raises(RankError, match="in set-up"):
        lab.run(script(FIRST, "fails")).wait(BOUND)
    run = lab.run(script(LATER + TRAINS)).wait(BOUND)
    assert run.state == "done" and said(run) == [NOTHING] * 2


def default_types(lab: Lab) -> list[str]:
    def seen() -> str:
        import torch

        return str(torch.get_default_dtype())

    return list(lab.view.apply_sync(seen))


def test_a_task_sees_no_state_of_a_loop_and_a_script_no_state_of_a_task(
    lab: Lab, script: Callable[..., Experiment]
) -> None:
    def train() -> None:
        torch.set_default_dtype(torch.float64)
        loop()

    def model() -> nn.Module:
        assert torch.get_default_dtype() == torch.float32
        torch.set_default_dtype(torch.float64)
        return nn.Linear(4, 1)

    assert lab.run(Experiment(task=Loop(run=train), ranks=2, strategy=DDP(), eval_every=0)).wait(BOUND).state == "done"
    task = replace(by_workers(False), model=model)
    for _ in range(2):
        run = lab.run(Experiment(task=task, ranks=2, strategy=DDP(), steps=3, eval_every=0))
        assert run.wait(BOUND).state == "done"
    run = lab.run(script(LATER + TRAINS)).wait(BOUND)
    assert said(run) == [NOTHING] * 2


def test_the_processes_of_a_script_end_soon_after_it(lab: Lab, script: Callable[..., Experiment]) -> None:
    assert lab.run(script(FIRST + TRAINS)).wait(BOUND).state == "done"
    before = pids(lab)
    assert until(lambda: not {*before} & {*pids(lab)} and not any(map(psutil.pid_exists, before)), BOUND)
    assert default_types(lab) == ["torch.float32"] * 2, "cells reach the new ones"
    assert lab.cluster.is_healthy and lab.state == "idle" and not lab.notes
