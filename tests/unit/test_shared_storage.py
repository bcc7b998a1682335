"""Tests that models whose parameters share memory are refused, because ranks keep parameters in buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import experiment, run
from workbench import adopt, simulate
from workbench.settings import KnobError
from workbench.strategies import DDP, Strategy, TorchDDP, ZeRO3
from workbench.tasks import Loop, Task, steps
from workbench.tasks._shared_storage import require_own_storage

SAID = "model: 0.weight and 2.weight share memory, and ranks cannot keep that; to tie two layers, give them one Param"


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def tied_by_data() -> nn.Sequential:
    model = layers()
    model[2].weight.data = model[0].weight.data
    return model


def task() -> Task:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    return Task(
        model=tied_by_data,
        data=lambda rank, ranks, seed: [torch.ones(2, 4)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=sgd,
    )


def train_in_loop() -> None:
    model = tied_by_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in steps([torch.ones(2, 4)] * 4, model):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), TorchDDP(), ZeRO3()])
def test_real_ranks_refuse_parameters_that_share_memory(strategy: Strategy) -> None:
    with pytest.raises(AssertionError, match=SAID):
        run(experiment(2, 2, task=task(), strategy=strategy), within=60.0)


@pytest.mark.ranks
def test_a_loop_refuses_parameters_that_share_memory() -> None:
    with pytest.raises(AssertionError, match=SAID):
        run(experiment(1, 2, task=Loop(run=train_in_loop), strategy=DDP()), within=60.0)


@pytest.mark.parametrize("strategy", [DDP(), ZeRO3()])
def test_simulator_refuses_parameters_that_share_memory(strategy: Strategy) -> None:
    with pytest.raises(KnobError, match=SAID):
        simulate(experiment(2, 2, task=task(), strategy=strategy, pace=2.0), real=True)


def test_adopt_refuses_parameters_that_share_memory() -> None:
    model = tied_by_data()
    with pytest.raises(KnobError, match=SAID):
        adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(2, 4), torch.ones(2, 4))], nn.MSELoss())


def tied() -> nn.Module:
    model = layers()
    model[2].weight = model[0].weight
    return model


def flat_vector() -> nn.Module:
    model, flat = layers(), torch.zeros(40)
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return model


def columns() -> nn.Module:
    whole = torch.zeros(4, 8)
    return nn.ParameterList([nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:]), nn.Parameter(torch.zeros(0))])


def frozen() -> nn.Module:
    return tied_by_data().requires_grad_(False)


@pytest.mark.parametrize("make", [layers, tied, flat_vector, columns, frozen])
def test_parameters_that_share_no_element_are_accepted(make: Any) -> None:
    assert require_own_storage(make()) is None


def buffer_of_parameter() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("average", model.weight.data)
    return model


def row_of_matrix() -> nn.Module:
    matrix = torch.zeros(4, 4)
    return nn.ParameterList([nn.Parameter(matrix), nn.Parameter(torch.zeros(3)), nn.Parameter(matrix[2])])


def crossed() -> nn.Module:
    matrix = torch.zeros(4, 4)
    return nn.ParameterList([nn.Parameter(matrix[:, 1]), nn.Parameter(matrix[2])])


def under_a_long_one() -> nn.Module:
    whole = torch.zeros(12)
    return nn.ParameterList([nn.Parameter(whole), nn.Parameter(whole[1:1]), nn.Parameter(whole[6:8])])


@pytest.mark.parametrize(("make", "names"), [
    (buffer_of_parameter, "weight and average"), (row_of_matrix, "0 and 2"), (crossed, "0 and 1"),
    (under_a_long_one, "0 and 2")])  # fmt: skip
def test_shared_elements_are_found(make: Any, names: str) -> None:
    with pytest.raises(KnobError, match=f"model: {names} share memory"):
        require_own_storage(make())
