"""Ranks that come and go because somebody asked for it: 2, 4, 3 on real ranks, under every strategy."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from tests.ranks import Rows, gone_before_it_meets, live, mse, shipped, toy
from workbench.compressors import ErrorFeedback, TopK
from workbench.engine.session import Session
from workbench.experiment import Experiment
from workbench.host.canonical import state_hash
from workbench.host.slots import slots
from workbench.partitions import Pipeline, Tensor
from workbench.strategies import DDP, HierarchicalLocalSGD, LocalSGD, Strategy
from workbench.tasks import ByteGPT, ClickThrough, Digits

pytestmark = pytest.mark.ranks
LIMIT = 60.0  # seconds for a step of a test


class Crowd:
    """All ranks that ever were in one run."""

    def __init__(self, e: Experiment, **more: Any) -> None:
        self.every = live(e, **more)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for s in self.every:
            s.abort(asked=True)
        assert all(s.join(30) for s in self.every)

    @property
    def first(self) -> Session:
        return next(s for s in self.there if s.rank.id == 0)

    @property
    def there(self) -> list[Session]:
        return [s for s in self.every if not s.join(0) and s.phase != "waiting"]

    def until(self, what: Any) -> None:
        end = time.monotonic() + LIMIT
        while not what():
            for s in self.every:
                assert s.error is None, s.error["traceback"]
            assert time.monotonic() < end, [s.status() for s in self.every]
            time.sleep(0.002)

    def reach(self, step: int) -> None:
        self.until(lambda: all(s.rank.step >= step for s in self.there))

    def resize(self, *members: int) -> None:
        for m in members:
            if m >= len(self.every):
                self.call(len(members))
        waiting = [s for s in self.every if s.joins and s.training is None and not s.join(0)]
        self.until(lambda: all(s.phase == "waiting" for s in waiting))
        known = len(self.said("refused"))
        self.first.request({"kind": "resize", "members": list(members), "id": f"resize {members}"})
        self.until(lambda: len(self.said("refused")) > known or (
            len(self.there) == len(members) and all(set(s.members) == set(members) for s in self.there)))  # fmt: skip

    def call(self, ranks: int) -> None:
        """One more session, which waits to be one of so many ranks."""
        first = self.every[0]
        made = Session(first.began_with, rank=len(self.every), size=ranks, store=first.where, generation=first.base,
                       secret=first.secret, epoch=time.time(), joins=True)  # fmt: skip
        made.record.close()
        made.record = Rows()  # type: ignore[assignment]
        made.start()
        self.every.append(made)

    def said(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(m[3]) for s in self.every for m in s.record.noted(name)]

    def stopped(self) -> list[Session]:
        """Those who trained at the end."""
        there = self.there
        self.first.request({"kind": "stop", "id": "stop"})
        self.until(lambda: all(s.join(0) for s in self.every))
        return there


def setting(strategy: Strategy, **more: Any) -> Experiment:
    task = ClickThrough() if strategy.tables else Digits()
    rest = {"task": task, "ranks": 2, "steps": 0, "eval_every": 10, "seed": 3}
    return Experiment(strategy=strategy, **{**rest, **more}).checked()


NAMES = [name for name, cls in sorted(shipped(Strategy).items()) if not cls().tables]


@pytest.mark.parametrize("name", NAMES)
def test_two_then_four_then_three(name: str) -> None:
    strategy = shipped(Strategy)[name]()
    with Crowd(setting(strategy)) as crowd:
        crowd.reach(4)
        crowd.resize(0, 1, 2, 3)
        crowd.reach(crowd.first.rank.step + 3)
        crowd.resize(1, 2, 3)
        if said := crowd.said("refused"):
            assert [r["reason"] for r in said] == ["group=2 does not divide 3 ranks into equal groups; use one of 1, 3"]
        crowd.reach(crowd.first.rank.step + 3)
        there = crowd.stopped()
        assert [s.phase for s in there] == ["stopped"] * (4 if said else 3)
        marks = crowd.said("members")
        assert marks[0]["new"] == [2, 3] and (said or marks[1]["gone"] == [0])
        if strategy.exact and not strategy.shards and not strategy.late_update:
            assert len({state_hash(s.layout) for s in there}) == 1


@pytest.mark.parametrize("partition", [Pipeline(), Tensor()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=2)], ids=lambda s: type(s).__name__)
def test_a_second_replica_comes_and_goes(strategy: Strategy, partition: Any) -> None:
    with Crowd(setting(strategy, partition=partition, task=ByteGPT())) as crowd:
        crowd.reach(2)
        crowd.resize(0, 1, 2, 3)
        crowd.reach(crowd.first.rank.step + 2)
        crowd.resize(0, 1, 3)
        assert "one replica takes 2 ranks, and 3 cannot be dealt out" in crowd.said("refused")[0]["reason"]
        crowd.resize(2, 3)
        crowd.reach(crowd.first.rank.step + 2)
        assert [s.member for s in crowd.stopped()] == [2, 3]


def test_who_comes_has_to_the_bit_what_the_others_have() -> None:
    """At the boundary itself: the run is paused, so nobody has stepped since."""
    with Crowd(setting(DDP())) as crowd:
        crowd.reach(6)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.until(lambda: crowd.first.phase == "paused")
        before = state_hash(crowd.first.layout)
        crowd.resize(0, 1, 2)
        crowd.until(lambda: crowd.first.phase == "paused")
        there = crowd.there
        assert {state_hash(s.layout) for s in there} == {before}
        held = [slots(s.layout, s.optimizer) for s in there]
        assert all(h.keys() == held[0].keys() and all(torch.equal(h[k], held[0][k]) for k in h) for h in held)
        assert len({s.rank.step for s in there}) == 1 and len({s.rank.lr for s in there}) == 1


def test_what_one_who_goes_owes_becomes_an_heirs() -> None:
    with Crowd(setting(DDP(), ranks=3, compressor=ErrorFeedback(of=TopK(density=0.01)), eval_every=0)) as crowd:
        crowd.reach(5)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.until(lambda: crowd.first.phase == "paused")
        time.sleep(0.2)  # the others have come to the same boundary
        owed = total(crowd.there)
        crowd.resize(0, 1)
        crowd.until(lambda: crowd.first.phase == "paused")
        after = total(crowd.there)
        assert owed.keys() == after.keys() and float(sum(x.abs().sum() for x in owed.values())) > 0
        for name, x in owed.items():
            torch.testing.assert_close(after[name], x, rtol=1e-5, atol=1e-6)


def total(sessions: list[Session]) -> dict[str, torch.Tensor]:
    """What all together owe."""
    found: dict[str, torch.Tensor] = {}
    for s in sessions:
        for name, x in s.rank.memory.buffers[ErrorFeedback.residual].items():
            found[name] = found.get(name, torch.zeros_like(x)) + x
    return found


def test_so_many_that_cannot_train_are_refused_and_nothing_happens() -> None:
    with Crowd(setting(HierarchicalLocalSGD(group=2), ranks=4)) as crowd:
        crowd.reach(3)
        crowd.resize(0, 1, 2)
        assert crowd.said("refused")[0]["reason"].startswith("group=2 does not divide 3 ranks")
        crowd.reach(crowd.first.rank.step + 3)
        assert len(crowd.stopped()) == 4 and not crowd.said("members")


def test_who_was_to_come_leaves_where_one_is_lost_before_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_before_it_meets(monkeypatch, 1)
    with Crowd(setting(DDP(), ranks=3, on_death="go on")) as crowd:
        crowd.reach(4)
        crowd.resize(0, 1, 3)
        assert crowd.said("refused")[0]["reason"] == "ranks=3: a rank was lost before they had met; ask again"
        assert crowd.every[3].join(30) and crowd.every[3].phase == "stopped" and crowd.every[3].error is None
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.members for s in crowd.there] == [(0, 2)] * 2, "who was to be taken out is still there"
        assert "ranks 1, 3 are lost; ranks 0, 2 went on" in crowd.said("members")[0]["text"]
        crowd.resize(0, 4)
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.member for s in crowd.stopped()] == [0, 4]


def test_a_loss_that_is_below_the_runs_first_has_not_run_away_for_those_who_came_or_stayed() -> None:
    now = [2.0]
    task = toy(loss=lambda model, batch: mse(model, batch) * 0 + now[0])
    with Crowd(Experiment(task=task, strategy=DDP(), ranks=2, steps=0, diverged=10.0).checked()) as crowd:
        crowd.reach(3)
        now[0] = 1e-3
        crowd.reach(crowd.first.rank.step + 15)
        crowd.resize(0, 1, 2)
        crowd.reach(crowd.first.rank.step + 15)
        now[0] = 1.0
        crowd.reach(crowd.first.rank.step + 15)
        assert not crowd.said("diverged"), "it has learned something"
        now[0] = 50.0
        crowd.until(lambda: {said["rank"] for said in crowd.said("diverged")} == {0, 1, 2})
