"""A model that replaces a parameter's data by data of another shape is refused by name, on both hosts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ranks import Net, experiment, net, run, toy
from workbench import Experiment, simulate
from workbench.rank import StrategyError
from workbench.strategies import (
    DDP,
    HSDP,
    AsyncServer,
    BackupWorkers,
    HpZ,
    LocalSGD,
    Strategy,
    ZeRO1,
    ZeRO2,
    ZeRO3,
    ZeROInfinity,
    ZeROOffload,
)

SAID = r"parameter c.(bias|weight): the model has replaced its data of shape \[4(, 64)?\] and type float32 by \[5"


class Grown(Net):
    """Its 3rd forward in training gives the last layer another output."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        if self.forwards != 3:
            return super().forward(x)
        self.c.weight.data, self.c.bias.data = torch.zeros(5, 64), torch.zeros(5)
        return super().forward(x)[:, :4]


def grown(strategy: Strategy, bucket_mb: float = 0.01) -> Experiment:
    task = toy(model=partial(net, Grown), split=None)
    return experiment(2, 6, task=task, strategy=strategy, pace=2.0, bucket_mb=bucket_mb)


@pytest.mark.parametrize("bucket_mb", [0.01, 1.0])
@pytest.mark.parametrize("strategy", [
    DDP(), LocalSGD(), ZeRO1(), ZeRO2(), ZeRO3(), ZeROOffload(), ZeROInfinity(), HSDP(), HpZ(), BackupWorkers(),
    AsyncServer(),
], ids=lambda s: type(s).__name__)  # fmt: skip
def test_the_simulator_names_a_parameter_of_another_shape(strategy: Strategy, bucket_mb: float) -> None:
    with pytest.raises(StrategyError, match=SAID):
        simulate(grown(strategy, bucket_mb), real=True)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), BackupWorkers()], ids=lambda s: type(s).__name__)
def test_real_ranks_name_a_parameter_of_another_shape(strategy: Strategy) -> None:
    with pytest.raises(AssertionError, match=SAID):
        run(grown(strategy))
