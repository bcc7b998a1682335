"""Simulated ranks that use different parameters in one step train as plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workbench import DDP, Experiment, Task, ZeRO1, ZeRO3, simulate

# The losses of 2 ranks by step. Each of the 2 elements moves by its mean gradient: 1 / 2 and 10 / 2.
RIGHT = [[0, 0], [-1, -100], [-2, -200], [-3, -300]]


class ByRank(nn.Module):
    """Rank 0 uses one parameter, rank 1 the other."""

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
