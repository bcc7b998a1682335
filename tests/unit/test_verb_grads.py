"""Tests the verb `grads` on both hosts: exchange after backward, and steps without the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import experiment, net, run, toy, weights
from tests.sim.virtual import samples
from workbench import simulate
from workbench.rank import Rank
from workbench.strategies import DDP, Strategy

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class MeanOfGrads(Strategy):
    """A DDP that exchanges after backward."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        for bucket in await rank.grads():
            bucket.data.div_(rank.size)
            await rank.all_reduce(bucket.data, "sum", bucket.name)
        await rank.update()


@dataclass(frozen=True, kw_only=True)
class StepOfItsOwn(Strategy):
    """Plain gradient descent by `params`, without the optimizer."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        for bucket, grad in zip(await rank.params(), await rank.grads(), strict=True):
            await rank.all_reduce(grad.data.div_(rank.size), "sum", bucket.name)
            bucket.data.add_(grad.data, alpha=-rank.lr)
            grad.data.zero_()


@dataclass(frozen=True, kw_only=True)
class StepInItsPlace(Strategy):
    """The same descent in the optimizer's place."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        params, grads = await rank.params(), await rank.grads()
        for grad in grads:
            await rank.all_reduce(grad.data.div_(rank.size), "sum", grad.name)

        def move() -> None:
            for bucket, grad in zip(params, grads, strict=True):
                bucket.data.add_(grad.data, alpha=-rank.lr)

        await rank.update(by=move)


@dataclass(frozen=True, kw_only=True)
class MomentumShared(Strategy):
    """Each rank steps on its own gradient; the optimizer state is averaged after each step."""

    async def step(self, rank: Rank, state: Any) -> None:
        before = await rank.slots()
        assert bool(before) == (rank.step > 0) or before[0].is_meta
        await rank.forward()
        await rank.backward()
        await rank.update()
        for bucket in await rank.params():
            await rank.all_reduce(bucket.data.div_(rank.size), "sum", bucket.name)
        for slot in await rank.slots():
            await rank.all_reduce(slot.view(-1).div_(rank.size), "sum", "slot")


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02)


class Idle(nn.Module):
    """A model with one parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("bucket_mb", [0.01, 1.0])
@pytest.mark.parametrize("model", [net, lambda: net(Idle)], ids=["net", "idle"])
@pytest.mark.parametrize("own", [MeanOfGrads, StepOfItsOwn])
def test_the_update_uses_the_written_gradients(own: type[Strategy], model: Any, bucket_mb: float) -> None:
    e = experiment(2, 6, strategy=own(), task=toy(plain, model=model), bucket_mb=bucket_mb)
    sessions = run(e)
    want = run(experiment(2, 6, strategy=DDP(), task=toy(plain, model=model), bucket_mb=bucket_mb))
    for s in sessions:
        torch.testing.assert_close(weights(s), weights(want[0]), rtol=1e-6, atol=1e-7)
    simulated = simulate(e.set("pace", 1.0), real=True)
    torch.testing.assert_close(
        torch.tensor(samples(simulated, "loss", 1)), torch.tensor(sessions[1].record.losses()).double(),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    simulate(e.set("pace", 1.0))  # sizes only


def test_slots_are_the_optimizer_state() -> None:
    """With the mean of parameters and momenta after each step, momentum SGD equals data parallelism with momentum."""
    e = experiment(3, 6, strategy=MomentumShared())
    for s, want in zip(run(e), run(experiment(3, 6, strategy=DDP())), strict=True):
        torch.testing.assert_close(weights(s), weights(want), rtol=1e-5, atol=1e-6)
        mine, theirs = (x.optimizer.state_dict()["state"] for x in (s, want))
        for k, state in theirs.items():
            torch.testing.assert_close(mine[k]["momentum_buffer"], state["momentum_buffer"], rtol=1e-4, atol=1e-6)
    simulate(e.set("pace", 1.0))


def test_a_step_in_the_optimizers_place_moves_parameters_and_clears_gradients() -> None:
    own, placed = (run(experiment(2, 6, strategy=s()))[0] for s in (StepOfItsOwn, StepInItsPlace))
    assert torch.equal(weights(own), weights(placed))
    assert all(p.grad is None for p in placed.model.parameters())
    simulated = simulate(experiment(2, 6, strategy=StepInItsPlace(), pace=10), real=True)
    assert placed.record.losses() == pytest.approx(samples(simulated, "loss", 0), rel=1e-5)


@pytest.mark.parametrize("real", [True, False])
def test_a_step_in_the_optimizers_place_takes_an_updates_time(real: bool) -> None:
    spans = simulate(experiment(2, 3, strategy=StepInItsPlace(), pace=10), real=real).spans
    updates = spans[(spans.lane == "compute") & (spans.name == "update")]
    assert (updates.t1 - updates.t0).tolist() == pytest.approx([1e-3] * 6)
    (session, _) = run(experiment(2, 3, strategy=StepInItsPlace(), pace=10))
    took = [r[5] - r[4] for r in session.record if r[1:3] == ("compute", "update")]
    assert len(took) == 3 and min(took) >= 0.9e-3
