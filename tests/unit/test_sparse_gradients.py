"""Tests which strategies keep gradients sparse for an optimizer that requires it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run
from workbench import simulate
from workbench.experiment import Experiment
from workbench.settings import KnobError
from workbench.strategies import DDP, LocalSGD, OneBitAdam, Strategy, TorchDDP, ZeRO1
from workbench.tasks import Task


def rows(rank: int, ranks: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(40, (8, 3), generator=generator)


def learning(strategy: Strategy, kind: type = torch.optim.SparseAdam) -> Experiment:
    """Returns a run that trains an embedding with sparse gradients."""
    task = Task(model=lambda: nn.EmbeddingBag(40, 4, sparse=True), data=rows, evaluate=None,
                loss=lambda model, words: model(words).square().mean(),
                optimizer=lambda params: kind(list(params), lr=0.05))  # fmt: skip
    return Experiment(task=task, ranks=2, strategy=strategy, steps=4, eval_every=0, pace=2.0)


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), OneBitAdam()], ids=lambda s: type(s).__name__)
def test_sparse_adam_is_refused_if_buckets_are_dense(strategy: Strategy) -> None:
    with pytest.raises(KnobError, match=f"strategy={type(strategy).__name__}: .*SparseAdam"):
        simulate(learning(strategy), real=True)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [TorchDDP(), LocalSGD(every=2)], ids=lambda s: type(s).__name__)
def test_sparse_adam_trains_if_gradients_stay_sparse(strategy: Strategy) -> None:
    first, second = (session.model.weight for session in run(learning(strategy)))
    assert torch.equal(first, second)


@pytest.mark.ranks
def test_sgd_takes_the_dense_sum_of_sparse_gradients() -> None:
    ours, theirs = (run(learning(strategy, torch.optim.SGD))[0].model.weight for strategy in (DDP(), TorchDDP()))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
