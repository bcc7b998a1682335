"""Tests that buckets follow the order of gradients before the first step, without side effects."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import experiment, mse, net, run, toy
from tests.sim.insides import simulated
from tests.sim.virtual import comm
from workbench import simulate
from workbench.experiment import Experiment
from workbench.host.sharding.read_order import foresee_trace
from workbench.strategies import DDP, HSDP, LocalSGD, ZeRO1
from workbench.tasks import ByteGPT


class Crossed(nn.Module):
    """Layers that are not registered in the order of use, a buffer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = nn.Linear(64, 4), nn.BatchNorm1d(64), nn.Linear(8, 64)
        self.drop, self.middle = nn.Dropout(0.3), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.middle(self.norm(self.first(x))))))


def crossed(**rest: Any) -> Experiment:
    task = toy(**{"model": lambda: net(Crossed), "evaluate": None, "pure": True, **rest})
    return experiment(2, 4, task=task, pace=2.0)


def cuts(marks: Any) -> list[list[int]]:
    return [json.loads(m[3])["nbytes"] for m in marks]


def training(comm: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """Returns the messages without the ones that ZeRO sends at its start."""
    return [one for one in comm if one[1] != "all_reduce slots"]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), HSDP(group=2)], ids=lambda s: type(s).__name__)
def test_the_first_step_has_the_final_buckets_on_every_host(strategy: Any) -> None:
    e = crossed().set("strategy", strategy)
    sessions = run(e)
    order = [place.name for place in sessions[0].layout.order]
    assert order[:2] == ["last.bias", "last.weight"] and order[-2:] == ["first.bias", "first.weight"]
    sent = training(sessions[0].record.comm())
    steps = [[(name, n) for step, name, n in sent if step == k] for k in range(4)]
    assert steps[0] == steps[1] == steps[3]
    (cut,) = cuts(sessions[0].record.noted("buckets"))
    assert cut == [b.nbytes for b in sessions[0].layout.buckets]
    for real in (True, False):
        virtual = simulate(e, real=real)
        assert [detail["nbytes"] for _, _, detail in virtual.details("buckets")] == [cut]
        assert training(comm(virtual, 0)) == sent


def test_finding_the_order_changes_no_random_number_or_buffer() -> None:
    e = crossed()
    learner, model = e.task.build(), net(Crossed)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    want = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert foresee_trace(learner, e, True) is not None
    assert torch.equal(want[0], torch.rand(3)) and (want[1] == np.random.rand(3)).all() and want[2] == random.random()
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())


def test_training_is_bit_identical_to_learning_the_order_in_the_first_step() -> None:
    """Compares in one process, with dropout. A model that reads a value shows its order in the first step only."""

    def looking(model: nn.Module, pair: Any) -> torch.Tensor:
        found = mse(model, pair)
        return found if float(found.detach()) < torch.inf else found * 0

    _, ahead = simulated(crossed())
    record, later = simulated(crossed(loss=looking))
    assert len(list(record.details("buckets"))) == 2
    for one, other in zip(ahead, later, strict=True):
        ours, theirs = (dict(s.model.named_parameters()) for s in (one.body, other.body))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert [p.name for p in one.layout.order] == [p.name for p in other.layout.order]


@pytest.mark.ranks
def test_an_order_that_cannot_be_predicted_is_learned_in_the_first_step() -> None:
    def looking(model: nn.Module, pair: Any) -> torch.Tensor:
        found = mse(model, pair)
        return found if float(found.detach()) < torch.inf else found * 0

    ahead, later = (run(crossed(**rest)) for rest in ({}, {"loss": looking}))
    assert len(cuts(ahead[0].record.noted("buckets"))) == 1 and len(cuts(later[0].record.noted("buckets"))) == 2
    assert [p.name for p in ahead[0].layout.order] == [p.name for p in later[0].layout.order]


@pytest.mark.ranks
def test_finding_the_order_does_not_build_the_model_twice() -> None:
    """A model that is read from a file cannot be built on the meta device; the first step shows its order."""
    made: list[int] = []

    def loaded() -> nn.Module:
        made.append(1)
        model = Crossed()
        assert float(model.first.weight.detach().abs().sum())  # a value that the meta device does not have
        return net(lambda: model)

    e = crossed(model=loaded)
    sessions = run(e)
    assert len(made) <= 4, "once on each rank, and once more that ended early"
    assert len(cuts(sessions[0].record.noted("buckets"))) == 2
    assert comm(simulate(e), 0) == sessions[0].record.comm()


def test_strategies_without_gradient_exchange_keep_the_layout() -> None:
    _, sessions = simulated(crossed().set("strategy", LocalSGD(every=2)))
    assert [p.name for p in sessions[0].layout.order] == [n for n, _ in reversed(list(net(Crossed).named_parameters()))]


def test_the_predicted_order_is_that_of_autograd() -> None:
    """Compares with autograd itself, on a transformer."""
    e = Experiment(task=ByteGPT(layers=2, width=32, context=16, heads=2)).checked()
    learner = e.task.build()
    model, came = learner.model(), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    learner.loss(model, next(iter(learner.data(0, 1, 2, 0)))).backward()
    trial = foresee_trace(learner, e, True)
    assert trial is not None and trial.gradient_order == came


def counted(kept: list[Any]) -> Any:
    """A loss that keeps something between calls: numbers, or the tensor itself."""

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        found = mse(model, pair)
        kept.append(found.detach())
        return found * (1.0 + len(kept))

    return loss


def test_only_steps_call_a_loss_that_is_not_declared_pure() -> None:
    kept: list[Any] = []
    sessions = run(experiment(1, 4, task=toy(loss=counted(kept), evaluate=None)))
    assert sessions[0].error is None and len(kept) == 4 and all(x.device.type == "cpu" and float(x) for x in kept)


def test_only_steps_read_data_that_exist_once() -> None:
    drawn = []

    def data(rank: int, ranks: int, seed: int) -> Any:
        for number in range(4):
            drawn.append((rank, number))
            yield torch.ones(4, 8), torch.zeros(4, 4)

    run(experiment(2, 4, task=toy(data=data, evaluate=None)))
    assert sorted(drawn) == [(rank, number) for rank in range(2) for number in range(4)]
