"""Tests the verbs `collect`, `factors`, `curve` and `value` on both hosts against explicit matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import batch, experiment, net, run, toy
from workbench import simulate
from workbench.experiment import Experiment
from workbench.rank import Rank, StrategyError
from workbench.strategies import Strategy
from workbench.strategies.second_order import curvature
from workbench.strategies.second_order.factors import Factors
from workbench.strategies.second_order.verbs import collect, curve, factors, value
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks
SEEN: dict[int, list[Any]] = {}  # by rank, the answers to a strategy below


@dataclass(frozen=True, kw_only=True)
class AsksForFactors(Strategy):
    """Uses two batches on each rank, with losses scaled for a sum over ranks."""

    async def step(self, rank: Rank, state: Any) -> None:
        await collect(rank)
        for micro in range(2):
            await rank.forward(micro=micro)
            await rank.backward(1 / 6, micro=micro)
        SEEN[rank.index] = await factors(rank)
        await rank.update()


@dataclass(frozen=True, kw_only=True)
class AsksForProducts(Strategy):
    """Requests products with every unit vector, and the loss before and after a move by one step."""

    moves: float = 0.0

    async def step(self, rank: Rank, state: Any) -> None:
        loss = await rank.forward()
        await rank.backward()
        grads, columns = await rank.grads(), []
        for index, bucket in enumerate(grads):
            for k in range(bucket.data.numel()):
                unit = [torch.zeros_like(b.data) for b in grads]
                if not bucket.data.is_meta:
                    unit[index][k] = 1.0
                columns.append(torch.cat(await curve(rank, unit)))
        same = await value(rank)
        for bucket in await rank.params():
            bucket.data.mul_(0.5)
        SEEN[rank.index] = [loss, same, await value(rank), torch.stack(columns), [p for b in grads for p in b.parts]]
        await rank.update()


def on(host: str, e: Experiment) -> list[Any]:
    """Returns the answers to rank 0 of the run."""
    SEEN.clear()
    run(e) if host == "engine" else simulate(e.set("pace", 5.0), real=host == "simulator")
    return SEEN[0]


def of_net(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Computes in numpy A and G of tests.ranks.Net's three layers. The loss is the mean squared error of these
    examples.
    """
    params = [p.detach().double().numpy() for p in net().parameters()]
    x = np.concatenate([x.double().numpy() for x, _ in pairs])
    y = np.concatenate([y.double().numpy() for _, y in pairs])
    fed, h = [], x
    for layer in range(3):
        fed.append(np.hstack([h, np.ones((len(h), 1))]))
        h = h @ params[2 * layer].T + params[2 * layer + 1]
        h = h if layer == 2 else np.tanh(h)
    slope, found = 2 * (h - y) / y.shape[1], []
    for layer in reversed(range(3)):
        found.append((fed[layer].T @ fed[layer] / len(x), slope.T @ slope / len(x)))
        slope = (slope @ params[2 * layer]) * (1 - fed[layer][:, :-1] ** 2)
    return found[::-1]


@pytest.mark.parametrize("host", ["engine", "simulator"])
def test_factors_are_the_second_moments_of_inputs_and_output_gradients(host: str) -> None:
    found = on(host, experiment(3, 1, strategy=AsksForFactors()))
    assert [f[:2] for f in found] == [(f"{k}.weight", f"{k}.bias") for k in "abc"]
    for f, (a, g) in zip(found, of_net([batch(0, 0, 0), batch(0, 1, 0)]), strict=True):
        np.testing.assert_allclose(f.inputs, a, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(f.outputs, g, rtol=1e-4, atol=1e-6)


def test_factors_from_shapes_alone_have_the_same_shapes() -> None:
    e = experiment(3, 1, strategy=AsksForFactors())
    real, sizes = on("simulator", e), on("sizes", e)
    assert all(f.inputs.is_meta and f.outputs.is_meta for f in sizes)
    assert [_shape(f) for f in real] == [_shape(f) for f in sizes]


def _shape(f: Factors) -> tuple[Any, ...]:
    return f.weight, f.bias, f.inputs.shape, f.outputs.shape, f.inputs.dtype


class Odd(nn.Module):
    """A layer that runs twice, two with one weight, one that never runs, and one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.never, self.last = nn.Linear(8, 3), nn.Linear(8, 4, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.one(self.twice(self.twice(x)))))


def test_layers_with_a_shared_weight_have_no_factors_and_repeated_calls_add_up() -> None:
    found = on("engine", experiment(2, 1, task=toy(model=partial(net, Odd)), strategy=AsksForFactors()))
    by = {f.weight: f for f in found}
    assert list(by) == ["twice.weight", "never.weight", "last.weight"] and by["last.weight"].bias == ""
    assert not by["never.weight"].inputs.any() and not by["never.weight"].outputs.any()
    model = net(Odd)
    x = torch.cat([batch(0, 0, 0)[0], batch(0, 1, 0)[0]])
    rows = torch.cat([x, model.twice(x)])
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    torch.testing.assert_close(by["twice.weight"].inputs, rows.T @ rows / len(rows))
    y = torch.cat([batch(0, 0, 0)[1], batch(0, 1, 0)[1]])
    first = model.twice(x)
    second = model.twice(first)
    loss = (model.last(model.other(model.one(second))) - y).square().mean(1).sum()
    slopes = torch.cat(torch.autograd.grad(loss, [first, second]))  # of each row's own loss
    torch.testing.assert_close(by["twice.weight"].outputs, slopes.T @ slopes / len(x), rtol=1e-4, atol=1e-6)


class Judge(nn.Module):
    """Gives three classes from eight numbers, by attention between two tokens and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.hidden, self.out = nn.Linear(4, 6), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.view(-1, 1, 2, 4)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)
        return self.out(torch.tanh(self.hidden(mixed)))


def judged(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(pair[0]), pair[1].argmax(1) % 3)


@pytest.mark.parametrize("host", ["engine", "simulator"])
def test_a_product_is_with_the_gauss_newton_matrix(host: str) -> None:
    task = toy(model=partial(net, Judge), loss=judged, evaluate=None)
    first, same, after, columns, parts = on(host, experiment(1, 1, task=task, strategy=AsksForProducts()))
    model, (x, y) = net(Judge), batch(0, 0, 0)
    named = dict(model.named_parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):

        def logits(flat: torch.Tensor) -> torch.Tensor:
            pieces = flat.split([p.stop - p.start for p in parts])
            given = {p.name: piece.view(p.shape) for p, piece in zip(parts, pieces, strict=True)}
            return torch.func.functional_call(model, given, (x,)).flatten()

        at = torch.cat([named[p.name].detach().flatten() for p in parts])
        jacobian = torch.autograd.functional.jacobian(logits, at)
    shares = torch.softmax(logits(at).detach().view(4, 3), 1)
    bends = torch.block_diag(*[torch.diag(s) - s[:, None] * s for s in shares]) / 4  # of the mean cross-entropy
    torch.testing.assert_close(columns.T, jacobian.T @ bends @ jacobian, rtol=1e-4, atol=1e-6)
    assert float(torch.linalg.eigvalsh(columns.double())[0]) > -1e-6
    assert float(first) == pytest.approx(float(same), rel=1e-6) == pytest.approx(judged(net(Judge), (x, y)).item())
    halved = net(Judge)
    for p in halved.parameters():
        p.data.mul_(0.5)
    assert float(after) == pytest.approx(judged(halved, (x, y)).item(), rel=1e-5)


class Noisy(nn.Module):
    """Running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(x)))


@dataclass(frozen=True, kw_only=True)
class AsksAgain(Strategy):
    """Requests the loss of one batch twice, with a product in between."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        first = await value(rank)
        await curve(rank, [torch.ones_like(b.data) for b in await rank.grads()])
        SEEN[rank.index] = [first, await value(rank)]
        await rank.update()


@dataclass(frozen=True, kw_only=True)
class AsksNothing(Strategy):
    """Makes only the step."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()


def test_recomputation_repeats_random_numbers_and_leaves_the_model_unchanged() -> None:
    task = toy(model=partial(net, Noisy))
    (asked,) = run(experiment(1, 3, task=task, strategy=AsksAgain()))
    first, second = SEEN[0]
    assert float(first) == float(second)
    (plain,) = run(experiment(1, 3, task=task, strategy=AsksNothing()))
    for name, x in plain.model.state_dict().items():
        assert torch.equal(x, asked.model.state_dict()[name]), name


@dataclass(frozen=True, kw_only=True)
class AsksTooSoon(Strategy):
    """Requests values before anything was collected."""

    what: str = "factors"

    async def step(self, rank: Rank, state: Any) -> None:
        await (factors(rank) if self.what == "factors" else value(rank))


@pytest.mark.parametrize(("what", "said"), [("factors", "before `collect`"), ("value", "before its forward")])
def test_requests_before_collecting_are_refused_with_a_reason(what: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        simulate(experiment(1, 1, strategy=AsksTooSoon(what=what), pace=5.0), real=True)


@pytest.mark.parametrize(("loss", "said"), [
    (lambda model, pair: (model(pair[0]) + model(-pair[0])).square().mean(), "calls the model 2 times"),
    (lambda model, pair: model(pair[0]).mean(), "linear in the model's output"),
])  # fmt: skip
def test_a_loss_without_gauss_newton_matrix_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        simulate(experiment(1, 1, task=toy(loss=loss), strategy=AsksAgain(), pace=5.0), real=True)


def test_curvature_works_on_a_transformer() -> None:
    task = ByteGPT(layers=1, width=16, heads=2, context=8)
    simulate(Experiment(task=task, ranks=1, steps=2, strategy=AsksAgain(), eval_every=0, pace=5.0), real=True)
    assert torch.isfinite(torch.stack(SEEN[0])).all()


def test_attention_kernels_are_restored_after_the_last_rank() -> None:
    """Ranks on threads request products at overlapping times."""
    first, second = curvature._twice_differentiable(), curvature._twice_differentiable()
    before = torch.backends.cuda.flash_sdp_enabled()
    with first:
        second.__enter__()
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled(), "the other still computes"
    second.__exit__(None, None, None)
    assert torch.backends.cuda.flash_sdp_enabled() is before is True
