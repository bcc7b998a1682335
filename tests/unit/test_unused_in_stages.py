"""Tests parameters that no micro-batch uses, under every schedule of a pipeline and on both hosts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import batch, experiment, run, shipped
from tests.thinned import thinned
from workbench import Checkpoint, simulate
from workbench.experiment import Experiment
from workbench.partitions import Pipeline
from workbench.partitions.schedules import PipeDream, Schedule
from workbench.tasks import Task

SCHEDULES = shipped(Schedule)


class Layer(nn.Module):
    """A layer with a parameter that its forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.extra = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


def made() -> nn.Sequential:
    model, rng = nn.Sequential(*(Layer() for _ in range(4))), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * 0.3)
    return model


TASK = Task(model=made, data=lambda rank, ranks, seed: [batch(rank, step) for step in range(8)],
            loss=lambda model, pair: model(pair[0]).square().mean(),
            optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))  # fmt: skip


def staged(name: str, **rest: Any) -> Experiment:
    schedule = SCHEDULES[name]
    partition = Pipeline(stages=2, micros=1 if schedule is PipeDream else 4, schedule=schedule())
    return experiment(2, 3, task=TASK, partition=partition, **rest)


def require_only_used_moved(ended: dict[str, Tensor]) -> None:
    for name, before in made().named_parameters():
        if name in ended:
            assert torch.equal(ended[name], before) == name.endswith("extra"), name


@pytest.mark.ranks
@pytest.mark.parametrize("name", thinned([(name,) for name in SCHEDULES], of=3))
def test_a_parameter_that_no_micro_batch_uses_stays_unchanged_on_real_stages(name: str) -> None:
    ended = {place.name: place.param.detach() for session in run(staged(name)) for place in session.layout.order}
    assert len(ended) == 12
    require_only_used_moved(ended)


@pytest.mark.ranks
@pytest.mark.parametrize("name", thinned([(name,) for name in SCHEDULES], of=3))
def test_a_parameter_that_no_micro_batch_uses_stays_unchanged_on_simulated_stages(name: str, tmp_path: Path) -> None:
    simulate(staged(name, save_every=3, pace=5.0), real=True, checkpoints=tmp_path)
    (saved,) = tmp_path.iterdir()
    require_only_used_moved(dict(Checkpoint.open(saved).model(TASK).named_parameters()))
