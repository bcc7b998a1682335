"""PipeDream and PipeDream-2BW: the weights that follow from their definitions, computed by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.piped import batches, deep, piped, same, seen
from tests.ranks import run
from workbench.experiment import Experiment
from workbench.host.cutting import cut
from workbench.host.piece import micro_batches
from workbench.host.versions import Version
from workbench.optimizers import SGD, AdamW, Optimizer
from workbench.partitions import Pipeline
from workbench.partitions.schedules import PipeDream, PipeDream2BW

pytestmark = pytest.mark.ranks

Weights = dict[str, torch.Tensor]
OPTIMIZERS = [SGD(momentum=0.0), SGD(momentum=0.9), AdamW()]


def dream(stages: int, **rest: Any) -> Pipeline:
    return Pipeline(stages=stages, micros=1, schedule=PipeDream(), **rest)


def twice(stages: int, micros: int, **rest: Any) -> Pipeline:
    return Pipeline(stages=stages, micros=micros, schedule=PipeDream2BW(), **rest)


def stashed(step: int, stage: int, stages: int) -> int:
    """PipeDream: which version of a stage's weights the minibatch of this step reads."""
    return max(0, step - (stages - 1 - stage))


def delayed(step: int, stage: int, stages: int) -> int:
    """PipeDream-2BW: the same of a batch."""
    return max(0, step - 1)


def recurred(e: Experiment, reads: Callable[[int, int, int], int], *phases: int) -> Weights:
    """What comes of the definition: all versions are kept, each batch is computed whole, one after the other.

    phases: steps between which the pipeline is drained
    """
    model, optimizer, replicas = deep(), None, e.ranks // e.partition.size
    stages, micros = e.partition.depth, e.partition.micro_batches
    params = dict(model.named_parameters())
    where = {name: stage for stage, names in enumerate(cut(e, model, e.task.build()).names) for name in names}
    optimizer = e.optimizer.make(list(params.values()), e.lr, lambda lr: torch.optim.SGD(params.values(), lr))
    number = 0
    for steps in phases:
        versions: list[Weights] = []
        for step in range(steps):
            versions.append({name: p.detach().clone() for name, p in params.items()})
            sums: list[Weights] = []
            for replica in range(replicas):
                old = {name: versions[reads(step, stage, stages)][name].clone().requires_grad_()
                       for name, stage in where.items()}  # fmt: skip
                for x, y in micro_batches(batches(replica, replicas, 0)[number % 8], micros):
                    made = nn.functional.mse_loss(functional_call(model, old, (x,)), y)
                    made.backward(torch.tensor(1.0 / micros))
                sums.append({name: x.grad for name, x in old.items()})
            for name, p in params.items():
                first, *others = (each[name] for each in sums)
                p.grad = sum(others, first) / replicas if replicas > 1 else first
            optimizer.step()
            number += 1
    return params


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_pipedream_is_bit_equal_to_its_definition(optimizer: Optimizer, ranks: int, stages: int) -> None:
    e = piped(ranks, 10, partition=dream(stages), optimizer=optimizer)
    sessions = run(e)
    want = recurred(e, stashed, 10)
    same(sessions, stages, want)
    assert [seen(s, "loss") for s in sessions[:stages]] == [seen(sessions[0], "loss")] * stages


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("ranks", "stages", "micros"), [(2, 2, 4), (2, 2, 2), (3, 3, 4), (4, 4, 8), (4, 2, 4)])
def test_2bw_is_bit_equal_to_its_definition(optimizer: Optimizer, ranks: int, stages: int, micros: int) -> None:
    e = piped(ranks, 10, partition=twice(stages, micros), optimizer=optimizer)
    same(run(e), stages, recurred(e, delayed, 10))


def far(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def test_the_recurrence_is_not_that_of_a_flush_nor_the_same_without_stashing() -> None:
    """So the tests above can fail: by versions of other stages, by one delay for all, and where nothing is stale."""
    e = piped(3, partition=dream(3))
    want = recurred(e, stashed, 10)
    for other in (delayed, lambda step, stage, stages: step, lambda step, stage, stages: max(0, step - stages + 1)):
        assert far(want, recurred(e, other, 10)) > 1e-3


def test_without_stashing_it_would_be_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward by the weights that are there by then, of a forward by older ones: what the stash is for."""
    e = piped(2, 10, partition=dream(2))
    with monkeypatch.context() as patch:
        patch.setattr(Version, "keep", lambda version: None)
        without = assembled(run(e), 2)
    assert far(recurred(e, stashed, 10), without) > 1e-3
