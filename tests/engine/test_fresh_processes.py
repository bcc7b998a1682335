"""What a run leaves behind in the processes of a lab: nothing that a later run could meet."""

from __future__ import annotations

from collections.abc import Iterator
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
from workbench.lab import Lab
from workbench.strategies import DDP
from workbench.tasks import Loop, Task

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="fresh") as made:
            yield made.wait(BOUND)


def workers(lab: Lab) -> list[int]:
    """The children of the engines."""
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
    """A loop of its own that leaves its workers to whoever comes."""
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
