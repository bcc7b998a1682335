"""Tests two shapes in the simulator: a deadline per step, and workers without locks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import batch, experiment, mse, net, toy
from workbench import simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.rank import Rank
from workbench.settings import Change
from workbench.strategies import DABMD, Strategy

pytestmark = pytest.mark.ranks

LINK = Link(bandwidth=1000.0, latency=0.1)


def sampled(run: Any, name: str, rank: int) -> list[float]:
    samples = run.samples
    return samples[(samples["name"] == name) & (samples["rank"] == rank)].sort_values("t")["value"].to_list()


def lasted(run: Any, lane: str, rank: int) -> list[float]:
    spans = run.spans[(run.spans["lane"] == lane) & (run.spans["rank"] == rank)]
    return (spans["t1"] - spans["t0"]).to_list()


# -- DABMD: at pace 10 ms, a batch takes 9 ms and the update 1 ms


def test_everyone_computes_until_the_deadline_as_many_batches_as_it_can() -> None:
    slow = Fabric(link=LINK, faults=(Slow(rank=1, factor=3.0),))
    run = simulate(experiment(4, 5, strategy=DABMD(window=50.0), pace=10.0, fabric=slow))
    assert [sampled(run, "batches", r) for r in range(4)] == [[5.0] * 5, [1.0] * 5, [5.0] * 5, [5.0] * 5]
    healthy = simulate(experiment(4, 5, strategy=DABMD(window=50.0), pace=10.0, fabric=Fabric(link=LINK)))
    assert max(lasted(run, "step", 0)) < 1.05 * max(lasted(healthy, "step", 0)), "a round is as long as without"


def test_dabmd_learns_and_all_ranks_leave_it_at_one_step() -> None:
    wanted = experiment(4, 24, strategy=DABMD(window=30.0), pace=10.0, fabric=Fabric(link=LINK), eval_every=20)
    run = simulate(wanted, changes=(Change(8, "strategy", "DDP"),), real=True)
    held_out = sampled(run, "held_out", 0)
    assert held_out[-1] < 0.5 * held_out[0]
    switches = run.spans[run.spans["lane"] == "switch"]
    assert switches["step"].to_list() == [switches["step"].iloc[0]] * 4


# -- several workers on one rank


@dataclass(frozen=True, kw_only=True)
class TwoAtOnce(Strategy):
    """Hogwild between two workers of each rank. All ranks share one vector."""

    lockstep: ClassVar[bool] = False
    shared: ClassVar[bool] = True
    workers: ClassVar[int] = 2
    exchanges: ClassVar[str] = "parameters"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_add_to_one_vector_without_waiting_for_each_other(ranks: int) -> None:
    plain = toy(partial(torch.optim.SGD, lr=0.02))
    chosen = experiment(ranks, 1, strategy=TwoAtOnce(), pace=10.0, eval_every=1, task=plain)
    run = simulate(chosen.set("faults", [Slow(rank=0, factor=2.0)]), real=True)
    assert lasted(run, "step", 0) == pytest.approx([20e-3]), "as long as one worker alone"
    model = net()
    grads: list[list[torch.Tensor]] = []
    for rank, step in product(range(ranks), range(2)):  # all workers read before any worker writes
        model.zero_grad()
        mse(model, batch(rank, step, 0)).backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    with torch.no_grad():
        for p, *all_of_them in zip(model.parameters(), *grads, strict=True):
            p -= 0.02 * sum(all_of_them)
        expected = float(mse(model, batch(1000, 0, 0, 64)))
    assert sampled(run, "held_out", 0)[-1] == pytest.approx(expected, rel=1e-5)
