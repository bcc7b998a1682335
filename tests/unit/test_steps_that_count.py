"""Tests steps that count for several: both hosts number, evaluate and end alike. A server makes no steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ranks import experiment, live, run
from tests.sim.virtual import rows
from tests.unit.test_engine_apart import over, until
from workbench import simulate
from workbench.fabric import Slow
from workbench.rank import Rank
from workbench.settings import Change
from workbench.strategies import AsyncServer, Strategy, SyncServer

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Strides(Strategy):
    """Steps with an odd number count twice, other steps once."""

    async def step(self, rank: Rank, state: Any) -> int | None:
        await rank.forward()
        await rank.backward()
        await rank.all_reduce(torch.zeros(1), "sum", "together")
        await rank.update()
        return 2 if rank.step % 2 else None


def test_both_hosts_number_evaluate_and_end_alike() -> None:
    e = experiment(2, 11, strategy=Strides(), eval_every=4)
    want = [0, 1, 3, 5, 7, 9]
    for s in run(e, Change(4, "lr", 0.01)):
        assert [r[0] for r in s.record if r[1] == "step"] == want
        assert [r[0] for r in s.record if r[1] == "eval"] == [0, 5, 9], "after the steps that passed 4 and 8"
        assert s.rank.step == 11 and s.phase == "done"
        assert [m[0] for m in s.record.noted("change")] == ([5] if s.rank.index == 0 else [])
    simulated = simulate(e.set("pace", 1.0), changes=[Change(4, "lr", 0.01)], real=True)
    for r in range(2):
        assert rows(simulated, "step", r).step.tolist() == want
        assert rows(simulated, "eval", r).step.tolist() == [0, 5, 9]
    assert [c.at_step for c in simulated.changes] == [5]


def test_requested_single_steps_are_reduced_by_a_steps_count() -> None:
    sessions = live(experiment(2, 0, strategy=Strides(), pace=2.0))
    try:
        until(lambda: sessions[0].rank.step > 4, sessions)
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions), sessions)
        begun = sessions[0].rank.step
        sessions[0].request({"kind": "step", "n": 3})
        until(lambda: all(s.rank.step > begun and s.phase == "paused" for s in sessions), sessions)
        assert {s.rank.step for s in sessions} == {begun + 4} and begun % 2 == 1
    finally:
        over(sessions)


@pytest.mark.parametrize("strategy", [AsyncServer(servers=1), SyncServer(servers=1)], ids=str)
def test_a_server_makes_no_step_although_it_meets_for_every_change(strategy: Strategy) -> None:
    e = experiment(4, 20, strategy=strategy)
    changes = [Change(6, "lr", 0.01), Change(12, "bucket_mb", 0.03)]
    sessions = run(e, *changes)
    assert [sum(r[1] == "step" for r in s.record) for s in sessions] == [20, 20, 20, 0]
    simulated = simulate(e.set("pace", 5.0), changes=changes)
    assert [len(rows(simulated, "step", r)) for r in range(4)] == [20, 20, 20, 0]
    assert len(simulated.changes) == 2


def test_a_rank_that_has_made_its_steps_makes_no_more_at_a_change() -> None:
    """Out of lockstep, other ranks may finish long before the slowest rank reaches the change's step."""
    slow = (Slow(rank=0, factor=8.0),)
    e = experiment(4, 20, strategy=AsyncServer(servers=1), pace=5.0).set("faults", slow)
    changes = [Change(6, "lr", 0.01), Change(12, "bucket_mb", 0.03)]
    simulated = simulate(e, changes=changes)
    assert [len(rows(simulated, "step", r)) for r in range(4)] == [20, 20, 20, 0] and len(simulated.changes) == 2
    assert [sum(r[1] == "step" for r in s.record) for s in run(e, *changes)] == [20, 20, 20, 0]
