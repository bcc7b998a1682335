"""Tests the handover between strategies: complete, to all ranks, exact, and with minimal traffic."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Net, ended, experiment, live, net, run, toy
from tests.sim.insides import simulated
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Slow
from workbench.host.transfer import handover
from workbench.settings import Change
from workbench.strategies import AsyncServer

pytestmark = pytest.mark.ranks
ADAM = partial(torch.optim.Adam, lr=1e-2)


class Normed(Net):
    """A model with running statistics. One statistic is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(torch.tanh(self.a(x))) + torch.tanh(self.b(torch.tanh(self.a(x)))))


def held(session: Session) -> dict[str, torch.Tensor]:
    return {**handover.list_parameters(session.layout), **handover.list_trainer_state(session.training)}


def seen_at_the_switch(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, torch.Tensor]]:
    """Returns each rank's state when the mean is taken and nothing is sent to servers yet."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    spread = handover.spread_state

    async def watched(run: Any, strategy: Any) -> None:
        found[run.rank.id] = {name: x.clone() for name, x in handover.list_trainer_state(run).items()}
        await spread(run, strategy)

    monkeypatch.setattr(handover, "spread_state", watched)
    return found


def test_servers_receive_the_mean_of_the_trainers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seen_at_the_switch(monkeypatch)
    task = toy(ADAM, model=partial(net, Normed))
    sessions = run(experiment(4, 9, task=task, strategy=AsyncServer(servers=1)), Change(9, "strategy", "DDP"))
    trained, served = [before[r] for r in range(3)], before[3]
    assert all(torch.equal(x, other[name]) for other in trained for name, x in trained[0].items()
               if x.is_floating_point())  # fmt: skip
    moments = [name for name in served if name.startswith("exp_avg")]
    assert len(moments) == 2 * len(sessions[0].layout.order) and not any(served[n].any() for n in moments)
    assert {"norm.running_mean", "norm.num_batches_tracked"} < set(trained[0])
    after = held(sessions[3])
    for name, x in trained[0].items():
        if x.is_floating_point():
            assert torch.equal(after[name], x), name
    assert {int(held(s)["norm.num_batches_tracked"]) for s in sessions} == {int(trained[0]["norm.num_batches_tracked"])}


def simulated_ranks(e: Experiment, *changes: Change) -> list[Any]:
    """Returns the simulated ranks at their end."""
    return simulated(e, *changes)[1]


def counters(session: Any) -> list[torch.Tensor]:
    """Returns the step counters of a rank's optimizer, by parameter."""
    return [session.optimizer.state[place.param]["steps"] for place in session.layout.order]


class Counting(torch.optim.SGD):
    """Counts its steps in integers, like some users' optimizers."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("steps", torch.zeros((), dtype=torch.int64)).add_(1)
        return super().step(closure)


@pytest.mark.parametrize("host", [run, simulated_ranks])
def test_different_step_counters_become_equal(host: Any) -> None:
    """Ranks without a common step have counted different numbers of steps. Their mean is no number of steps."""
    e = experiment(3, 12, task=toy(partial(Counting, lr=0.01)), strategy=AsyncServer(), pace=3)
    sessions = host(e.set("faults", [Slow(rank=1, factor=3.0)]), Change(8, "strategy", "DDP"))
    counts = [[int(x) for x in counters(s)] for s in sessions]
    assert len(counts) == 3 and counts[0] and counts[0] == counts[1] == counts[2]
    assert len(set(counts[0])) == 1 and counts[0][0] >= 8


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_engine_and_simulator_send_the_same_minimal_bytes(servers: int) -> None:
    e = experiment(4, 8, task=toy(ADAM), strategy=AsyncServer(servers=servers), pace=1)
    sessions = run(e, Change(8, "strategy", "DDP"))
    lacks = sum(x.numel() * x.element_size() for x in handover.list_trainer_state(sessions[0].training).values())
    sent = sorted(row for s in sessions for row in moved(s.record.comm()))
    assert sum(n for _, n in sent) == servers * lacks
    for real in (True, False):
        spans = simulate(e, changes=[Change(8, "strategy", "DDP")], real=real).spans
        spans = spans[(spans.lane == "comm") & (spans.name == "all_to_allv move")]
        assert sorted(spans.nbytes) == sorted(n for _, n in sent)


def moved(comm: list[tuple[int, str, int]]) -> list[tuple[str, int]]:
    return [(name, n) for _, name, n in comm if name.endswith("move")]


def test_ranks_with_different_optimizer_state_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different momenta would pull replicas apart without a visible cause."""
    spread = handover.spread_state

    async def spoiled(run: Any, strategy: Any) -> None:
        await spread(run, strategy)
        if run.rank.id == 1:
            next(iter(handover.read_slots(run.layout, run.optimizer).values())).add_(1.0)

    monkeypatch.setattr(handover, "spread_state", spoiled)
    sessions = live(experiment(3, 8, task=toy(ADAM)), (Change(4, "strategy", "LocalSGD"),))
    ended(sessions)
    # without the errors of lost peers
    said = {s.error["text"] for s in sessions if s.error and not s.error["consequence"]}
    assert said == {"after the switch the optimizer's slots of rank 1 differ from rank 0's"}
