"""Trials on one batch before a model is spread: a loss of NaN or 0.0 is a difference, too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.piped import ROWS, batches, deep, piped
from tests.piped import loss as piped_loss
from tests.ranks import batch, experiment, mse, toy
from workbench import simulate
from workbench.host.placement.tensor_split import split_model
from workbench.host.reconfigure.trial_slices import check_slices
from workbench.host.reconfigure.trial_units import require_submodels
from workbench.partitions import Pipeline
from workbench.settings import KnobError
from workbench.strategies import AsyncDrop

NAN, HIDDEN = float("nan"), 12
Loss = Callable[[nn.Module, Any], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))


def valued(loss: Tensor, value: float) -> Tensor:
    """Returns a loss of this value with the gradient of `loss`."""
    return loss - loss.detach() + value


def try_slices(loss: Loss) -> None:
    learner, model = toy(model=net, loss=loss, evaluate=None).build(), net()
    check_slices(model, learner, split_model(2, model, learner), batch(0, 0, 0))


def is_sliced(model: nn.Module) -> bool:
    return next(model.parameters()).shape[0] < HIDDEN


@pytest.mark.parametrize("value", [NAN, 0.0, 7.0])
def test_slices_with_another_loss_are_refused(value: float) -> None:
    def loss(model: nn.Module, pair: Any) -> Tensor:
        return valued(mse(model, pair), value) if is_sliced(model) else mse(model, pair)

    with pytest.raises(KnobError, match=f"the loss is {value:.6g}, and .* of the whole model"):
        try_slices(loss)


@pytest.mark.parametrize("wrong", [lambda made: valued(made, NAN), lambda made: made * NAN], ids=["loss", "gradients"])
def test_slices_of_a_model_whose_own_result_is_nan_are_not_blamed(wrong: Callable[[Tensor], Tensor]) -> None:
    tried: list[bool] = []

    def loss(model: nn.Module, pair: Any) -> Tensor:
        tried.append(is_sliced(model))
        return wrong(mse(model, pair))

    try_slices(loss)
    assert tried.count(True) == 2


@pytest.mark.parametrize("value", [NAN, 0.0, 7.0])
def test_units_whose_order_changes_the_loss_are_refused(value: float) -> None:
    calls: list[nn.Module] = []

    def loss(model: nn.Module, pair: Any) -> Tensor:
        calls.append(model)  # the third call, after a trial of double precision, has the units in another order
        return valued(mse(model, pair), value) if len(calls) == 3 else mse(model, pair)

    learner = toy(model=net, loss=loss, evaluate=None).build()
    wanted, model = experiment(2, 2, strategy=AsyncDrop()), net()
    run = SimpleNamespace(learner=learner, model=model, make_example=lambda _: batch(0, 0, 0),
                          layout=SimpleNamespace(order=[SimpleNamespace(param=next(model.parameters()))]))  # fmt: skip
    with pytest.raises(KnobError, match=f"in another order the model has the loss {value:.6g} in place of"):
        require_submodels(run, wanted)


@pytest.mark.parametrize("value", [NAN, 0.0, 7.0])
def test_micro_batches_with_another_mean_are_refused(value: float) -> None:
    def loss(model: nn.Module, pair: Any) -> Tensor:
        made = piped_loss(model, pair)
        return made if len(pair[0]) == ROWS else valued(made, value)

    task = toy(model=deep, data=batches, loss=loss, evaluate=None)
    with pytest.raises(KnobError, match=f"the mean over its micro-batches is {value:.6g}"):
        simulate(piped(2, 2, pace=2.0, task=task, partition=Pipeline(micros=2)), real=True)
