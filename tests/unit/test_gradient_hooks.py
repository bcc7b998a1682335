"""Hooks on gradients: the values that they see, the order, and their limits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import Net, experiment, mse, net, run, toy, weights
from workbench import simulate
from workbench.host.core.gradient_hooks import ModuleHooks, unscale_grads
from workbench.rank import StrategyError
from workbench.strategies import DDP, LocalSGD, Strategy, TorchDDP, TorchFSDP, Wavelet, ZeRO1, ZeRO3


def test_hooks_see_the_gradient_of_the_loss_before_it_was_scaled() -> None:
    p, seen = nn.Parameter(torch.ones(2)), []

    def clip(grad: Tensor) -> Tensor:
        seen.append(grad.tolist())
        return grad.clamp(max=1.0)

    p.register_hook(clip)
    with unscale_grads([p], 0.25):
        (3 * p).sum().backward(torch.tensor(0.25))
    assert seen == [[3.0, 3.0]]
    assert p.grad is not None and p.grad.tolist() == [0.25, 0.25]


def test_a_hook_can_be_removed_inside_and_the_others_are_as_before_afterwards() -> None:
    p = nn.Parameter(torch.ones(2))
    first, second = p.register_hook(lambda grad: 2 * grad), p.register_hook(lambda grad: 3 * grad)
    with unscale_grads([p], 0.5):
        first.remove()
    p.sum().backward()
    assert p.grad is not None and p.grad.tolist() == [3.0, 3.0]
    second.remove()
    assert not p._backward_hooks


@pytest.mark.parametrize("how", ["registered", "a new module", "a module inside of a module"])
def test_a_backward_hook_that_comes_between_two_steps_sees_the_unscaled_gradient(how: str) -> None:
    """It comes with a registration, or with a module that had it before."""
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1, bias=False)))
    hooks, seen = ModuleHooks(model), list[float]()
    inner, other = model[0], nn.Linear(1, 1, bias=False)
    assert isinstance(inner, nn.Sequential)
    late = inner[0] if how == "registered" else other
    note = lambda module, into, out: seen.append(float(out[0]))  # noqa: E731
    if how != "registered":
        other.register_full_backward_hook(note)

    def make_step() -> None:
        with hooks.wrap_hooks():
            loss = model(torch.ones(1, 1, requires_grad=True)).sum()
        with hooks.wrap_hooks(0.25):
            loss.backward(torch.tensor(0.25))

    make_step()
    assert seen == []
    if how == "registered":
        late.register_full_backward_hook(note)
    elif how == "a new module":
        model[0] = late
    else:
        inner[0] = late
    make_step()
    make_step()
    assert seen == [1.0, 1.0]


class Late(Net):
    """Its 3rd forward in training registers a hook that clips the accumulated gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        if self.forwards == 3:
            self.forwards += 1
            self.b.weight.register_post_accumulate_grad_hook(clip)
        return super().forward(x)


def clip(p: Any) -> None:
    p.grad.clamp_(-0.001, 0.001)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), TorchFSDP()], ids=lambda s: type(s).__name__)
def test_a_hook_registered_during_training_runs_before_the_exchange(strategy: Strategy) -> None:
    """SGD without momentum moves a weight that it clips by at most the rate times 0.001 in a step."""
    plain = partial(torch.optim.SGD, lr=0.5)
    for steps, bound in ((2, None), (6, 4 * 0.5 * 0.001)):
        task = toy(plain, model=partial(net, Late))
        before, after = (run(experiment(2, n, task=task, strategy=strategy))[0].model for n in (2, steps))
        moved = (after.b.weight - before.b.weight).detach().abs().max()
        assert float(moved) == 0 if bound is None else 0 < float(moved) <= bound * 1.001


HEARD: list[float] = []


class Heard(Net):
    """A backward hook notes the gradient of an output, and another one halves it."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda module, into, out: HEARD.append(float(out[0].norm())))
        self.b.register_full_backward_pre_hook(lambda module, out: (out[0] / 2,))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), DDP(accumulate=2), LocalSGD(), ZeRO3()], ids=str)
def test_backward_hooks_of_modules_see_what_they_see_under_torchs_ddp(strategy: Strategy) -> None:
    """That is the gradient of the rank's own loss, once for each backward."""
    e, found, moved = experiment(2, 1, task=toy(model=partial(net, Heard)), pace=2.0), [], []
    for one in (TorchDDP(), strategy):
        HEARD.clear()
        sessions = run(e.set("strategy", one))
        found.append(sorted(HEARD))
        moved.append(weights(sessions[0]))
    HEARD.clear()
    simulate(e.set("strategy", strategy), real=True)
    assert sorted(HEARD) == pytest.approx(found[1], rel=1e-5)
    if strategy in (DDP(), ZeRO3(), LocalSGD()):
        assert found[1] == pytest.approx(found[0], rel=1e-5) and len(found[0]) == 2
    if strategy in (DDP(), ZeRO3()):
        assert moved[1].tolist() == pytest.approx(moved[0].tolist(), rel=1e-5, abs=1e-7)
    assert len(found[1]) == 2 * getattr(strategy, "accumulate", 1) and found[1][-1] >= 0.99 * found[0][-1]


def take_away(p: Any) -> None:
    p.grad = None


def stepped_in_a_hook() -> nn.Module:
    model = net()
    model.b.weight.register_post_accumulate_grad_hook(take_away)
    return model


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), TorchFSDP()], ids=lambda s: type(s).__name__)
def test_a_hook_that_takes_a_gradient_away_is_refused_by_name(strategy: Strategy) -> None:
    said = "parameter b.weight: a hook of the model has set its gradient to None"
    e = experiment(2, 4, task=toy(model=stepped_in_a_hook), strategy=strategy, pace=2.0)
    with pytest.raises(AssertionError, match=said):
        run(e)
    if not strategy.opaque:
        with pytest.raises(StrategyError, match=said):
            simulate(e, real=True)


def penalised(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Adds the gradient of a penalty by a backward of its own."""
    model.b.weight.square().sum().backward()
    return mse(model, batch)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), DDP(accumulate=2), ZeRO1(), ZeRO3(), Wavelet()], ids=str)
def test_a_loss_that_calls_backward_is_refused_if_ranks_scale_the_loss(strategy: Strategy) -> None:
    """Its gradients are not scaled: they would count as often as there are ranks."""
    said = "parameter b.weight: the loss function has called backward"
    e = experiment(2, 4, task=toy(loss=penalised), strategy=strategy, pace=2.0)
    with pytest.raises(AssertionError, match=said):
        run(e)
    with pytest.raises(StrategyError, match=said):
        simulate(e, real=True)


@pytest.mark.ranks
def test_a_loss_that_calls_backward_trains_where_no_rank_scales_the_loss() -> None:
    e = experiment(1, 4, task=toy(loss=penalised), strategy=LocalSGD())
    before, after = net().b.weight.detach(), run(e)[0].model.b.weight.detach()
    assert float(after.norm()) < 0.9 * float(before.norm())
