"""The same problem on the simulator with real tensors, and how near it has to come to the papers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.golden.problem import INPUTS, LAYERS, OUTPUTS, SIZE, STEPS, Problem
from workbench import simulate
from workbench.experiment import Experiment
from workbench.run import Run
from workbench.settings import Change
from workbench.tasks import Task

NEAR = 1e-12  # of the largest parameter; float64 holds 1e-16


class Layers(nn.Module):
    """(e, LAYERS * INPUTS) -> (e, OUTPUTS): each layer has inputs of its own, and they add up."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float64) for _ in range(LAYERS))
        for layer, w in zip(self.layers, start.reshape(LAYERS, OUTPUTS, INPUTS), strict=True):
            layer.weight.data.copy_(torch.from_numpy(w))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(part) for layer, part in zip(self.layers, x.split(INPUTS, 1), strict=True))


def trained(problem: Problem, strategy: Any, inner: partial[Any], changes: Iterable[Change] = ()) -> np.ndarray:
    """(STEPS + 1, ranks, NUMEL): every rank's parameters at first and after each step."""
    return recorded(problem, strategy, inner, changes)[0]


def recorded(
    problem: Problem, strategy: Any, inner: partial[Any], changes: Iterable[Change] = (), bucket_mb: float = 0.01
) -> tuple[np.ndarray, Run]:
    """The same, as each forward finds them, and the record; `inner` names torch's optimizer.

    One step more is made than is compared, so the last row is what STEPS steps left. Each layer is a bucket of its own,
    or with 1 MB all are one.
    """
    seen: list[list[np.ndarray]] = [[] for _ in range(problem.ranks)]

    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        who = torch.full((problem.x.shape[2],), rank)
        pairs = zip(problem.x[rank], problem.y[rank], strict=True)
        return [(torch.from_numpy(x), torch.from_numpy(y), who) for x, y in pairs]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, who = batch
        flat = [p.detach().numpy().reshape(SIZE) for p in model.parameters()]
        seen[int(who[0])].append(np.concatenate(flat))
        return (model(x) - y).square().sum(1).mean() / 2

    task = Task(model=partial(Layers, problem.start), data=data, loss=loss,
                optimizer=partial(getattr(torch.optim, inner.func.__name__), **inner.keywords))  # fmt: skip
    e = Experiment(ranks=problem.ranks, steps=STEPS + 1, task=task, strategy=strategy, bucket_mb=bucket_mb,
                   eval_every=0, pace=5.0)  # fmt: skip
    run = simulate(e.checked(), changes=changes, real=True)
    buckets = run.details("buckets")[0][2]["nbytes"]
    assert buckets == ([8 * SIZE] * LAYERS if bucket_mb < 1 else [8 * SIZE * LAYERS]), "in float64"
    return np.stack([np.stack(rows) for rows in seen], axis=1), run


def agree(got: np.ndarray, want: np.ndarray, near: float = NEAR) -> None:
    """Every rank's parameters after every step; names the first step and rank in which they are apart."""
    assert got.shape == want.shape
    assert np.abs(want[-1] - want[0]).max() > 0.1, "nothing has been learned that could be wrong"
    apart = np.abs(got - want).max(2) / np.abs(want).max(2)
    if (bad := np.argwhere(~(apart <= near))).size:
        step, rank = bad[0]
        raise AssertionError(f"after step {step} rank {rank} is {apart[step, rank]:.2g} from the paper, "
                             f"in the end {apart[-1].max():.2g}; {near:g} is allowed")  # fmt: skip
