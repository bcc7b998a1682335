"""Checks that simulated ranks that use different parameters in one step train as plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import live
from workbench import DDP, Experiment, Task, ZeRO1, ZeRO3, simulate
from workbench.rank import StrategyError

# The losses of 2 ranks by step. Each of the 2 elements moves by its mean gradient: 1 / 2 and 10 / 2.
RIGHT = [[0, 0], [-1, -100], [-2, -200], [-3, -300]]


class ByRank(nn.Module):
    """A model in which rank 0 uses one parameter and rank 1 the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, rank: int) -> torch.Tensor:
        return self.a.sum() if rank == 0 else 10 * self.b.sum()


def task() -> Task:
    return Task(
        model=ByRank, data=lambda rank, ranks, seed: [rank], loss=lambda model, rank: model(rank),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    )  # fmt: skip


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO3()], ids=str)
def test_ranks_cut_buckets_in_the_order_that_rank_0_saw(strategy: Any) -> None:
    e = Experiment(task=task(), ranks=2, steps=4, eval_every=0, pace=5, strategy=strategy)
    rows = simulate(e, real=True).samples
    rows = rows[rows["name"] == "loss"]
    assert [rows[rows["step"] == k].sort_values("rank")["value"].tolist() for k in range(4)] == RIGHT


class Reentrant(nn.Module):
    """One layer in two re-entrant checkpoints, so that each backward adds to its gradient twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return x.square().mean()


def reentrant() -> Experiment:
    made = Task(
        model=Reentrant, data=lambda rank, ranks, seed: [torch.ones(2, 4)], loss=lambda model, x: model(x),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    return Experiment(task=made, ranks=2, steps=3, eval_every=0, pace=5)


@pytest.mark.ranks
def test_both_hosts_refuse_a_gradient_that_arrives_twice_with_the_same_error() -> None:
    with pytest.raises(StrategyError, match=r"parameter layer\.\w+ received a gradient twice") as refusal:
        simulate(reentrant(), real=True)
    for session in live(reentrant()):
        assert session.join(60.0) and session.error is not None
        assert str(refusal.value).partition(" received")[2] in session.error["text"]


def test_a_strategy_that_does_not_exchange_gradients_trains_re_entrant_checkpoints() -> None:
    rows = simulate(reentrant().set("strategy", "LocalSGD"), real=True).samples
    losses = rows[(rows["name"] == "loss") & (rows["rank"] == 0)]["value"].tolist()
    assert losses[2] < losses[1] < losses[0]
