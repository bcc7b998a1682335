"""Compares past causes of wrong numbers on two real ranks with plain torch, through the public API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.labs import shared_lab
from workbench import DDP, Experiment, Lab, ZeRO1
from workbench.tasks import Task

pytestmark = pytest.mark.engine


lab = shared_lab(2, "numbers")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def last_layer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[2:], lr=1.0)


def task(model: Callable[[], nn.Module], batches: list[Any], loss: Callable[[Any, Any], Tensor],
         optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> Task:  # fmt: skip
    return Task(model=model, data=lambda rank, ranks, seed: batches, loss=loss, optimizer=optimizer, keeps=True)


class Branch(nn.Module):
    """A model in which each batch uses one of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, second: int) -> Tensor:
        return (self.b if second else self.a).sum()


def frozen() -> nn.Module:
    model = Branch()
    model.b.requires_grad_(False)
    return model


def thaw(model: Any, late: int) -> Tensor:
    if late:
        model.b.requires_grad_(True)
    return model.a.sum() + model.b.sum()


def masked() -> nn.Module:
    model = ones(nn.Linear(3, 2))
    model.register_buffer("mask", torch.ones(3, 2).t())  # not contiguous
    return model


def ones(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.ones_(p)
    return model


def two_layers() -> nn.Module:
    return ones(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))


CASES: dict[str, tuple[Task, dict[str, Any], list[Any]]] = {
    "accumulated gradients of a branch": (
        task(Branch, [0, 1], lambda m, b: m(b)), {"steps": 2, "strategy": DDP(accumulate=2)}, [[-1, -1], [-1, -1]]),
    "a parameter that no batch uses": (
        task(Branch, [0], lambda m, b: m(b), lambda params: torch.optim.SGD(params, lr=1.0, weight_decay=1.0)),
        {"steps": 1}, [[-1, -1], [0, 0]]),
    "a parameter unfrozen while training": (task(frozen, [0, 1, 1], thaw), {"steps": 3}, [[-3, -3], [-2, -2]]),
    "an optimizer over some of the parameters, under ZeRO1": (
        task(two_layers, [torch.ones(1, 2)], lambda m, b: m(b).sum(), last_layer),
        {"steps": 1, "strategy": ZeRO1()}, [[[1, 1], [1, 1]], [1, 1], [[-2, -2]], [0]]),
    "a buffer that is not contiguous": (
        task(masked, [torch.ones(1, 3)], lambda m, b: m(b).sum()), {"steps": 1}, [[[0, 0, 0], [0, 0, 0]], [0, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_with_the_parameters_of_plain_torch(lab: Lab, name: str) -> None:
    what, settings, right = CASES[name]
    run = lab.run(Experiment(task=what, ranks=2, eval_every=0, diverged=0, **settings))
    run.wait(timeout=90)
    assert [p.detach().tolist() for p in run.model().parameters()] == right
