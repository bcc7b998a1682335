"""Adds and removes ranks on request: 2, 4, 3 real ranks, under every strategy."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import Rows, gone_before_it_meets, live, mse, shipped, toy
from workbench.compressors import ErrorFeedback, TopK
from workbench.engine.control import membership
from workbench.engine.rank import resizing
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.loop import generation
from workbench.host.placement.canonical_state import hash_model_state
from workbench.host.placement.optimizer_slots import read_slots
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.strategies import DDP, HierarchicalLocalSGD, LocalSGD, Strategy, ZeRO1, ZeRO3
from workbench.tasks import ByteGPT, ClickThrough, Digits

pytestmark = pytest.mark.ranks
LIMIT = 120.0  # seconds for a step of a test


class Crowd:
    """All sessions that ever took part in one run."""

    def __init__(self, e: Experiment, **more: Any) -> None:
        self.every = live(e, **more)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for s in self.every:
            s.abort(asked=True)
        assert all(s.join(60) for s in self.every)

    @property
    def first(self) -> Session:
        return next(s for s in self.there if s.rank.id == 0)

    @property
    def there(self) -> list[Session]:
        return [s for s in self.every if not s.join(0) and not (s.joins and s.phase in ("waiting", "starting"))]

    def until(self, what: Any) -> None:
        end = time.monotonic() + LIMIT
        while not what():
            for s in self.every:
                assert s.error is None, s.error["traceback"]
            assert time.monotonic() < end, [s.status() for s in self.every]
            time.sleep(0.002)

    def paused(self) -> None:
        """Waits until all training ranks are at the boundary at which the run is paused."""
        self.until(lambda: all(s.phase == "paused" for s in self.there) and len({s.rank.step for s in self.there}) == 1)

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
        """Adds a session that waits to be one of `ranks` ranks."""
        first = self.every[0]
        made = Session(first.began_with, rank=len(self.every), size=ranks, store=first.store_address,
                       run_id=first.run_id, secret=first.secret, epoch=time.time(), joins=True)  # fmt: skip
        made.record.close()
        made.record = Rows()  # type: ignore[assignment]
        made.start()
        self.every.append(made)

    def said(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(m[3]) for s in self.every for m in s.record.noted(name)]

    def stopped(self) -> list[Session]:
        """Stops the run; returns the sessions that trained at the end."""
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
def test_a_run_is_resized_from_two_to_four_to_three_ranks(name: str) -> None:
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
            assert len({hash_model_state(s.layout) for s in there}) == 1


@pytest.mark.parametrize("partition", [Pipeline(), Tensor()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=2)], ids=lambda s: type(s).__name__)
def test_a_second_replica_joins_and_leaves(strategy: Strategy, partition: Any) -> None:
    with Crowd(setting(strategy, partition=partition, task=ByteGPT())) as crowd:
        crowd.reach(2)
        crowd.resize(0, 1, 2, 3)
        crowd.reach(crowd.first.rank.step + 2)
        crowd.resize(0, 1, 3)
        assert "one replica takes 2 ranks, and 3 ranks are not a multiple of that" in crowd.said("refused")[0]["reason"]
        crowd.resize(2, 3)
        crowd.reach(crowd.first.rank.step + 2)
        assert [s.member for s in crowd.stopped()] == [2, 3]


def test_a_new_rank_is_bit_identical_to_the_others() -> None:
    """The run is paused at the boundary itself, so no rank has made a step since."""
    with Crowd(setting(DDP())) as crowd:
        crowd.reach(6)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.paused()
        before = hash_model_state(crowd.first.layout)
        crowd.resize(0, 1, 2)
        crowd.paused()
        there = crowd.there
        assert {hash_model_state(s.layout) for s in there} == {before}
        held = [read_slots(s.layout, s.optimizer) for s in there]
        assert all(h.keys() == held[0].keys() and all(torch.equal(h[k], held[0][k]) for k in h) for h in held)
        assert len({s.rank.step for s in there}) == 1 and len({s.rank.lr for s in there}) == 1


def test_the_residual_of_a_leaving_rank_goes_to_another_rank() -> None:
    with Crowd(setting(DDP(), ranks=3, compressor=ErrorFeedback(of=TopK(density=0.01)), eval_every=0)) as crowd:
        crowd.reach(5)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.paused()
        owed = total(crowd.there)
        crowd.resize(0, 1)
        crowd.paused()
        after = total(crowd.there)
        assert owed.keys() == after.keys() and float(sum(x.abs().sum() for x in owed.values())) > 0
        for name, x in owed.items():
            torch.testing.assert_close(after[name], x, rtol=1e-5, atol=1e-6)


def total(sessions: list[Session]) -> dict[str, torch.Tensor]:
    """Returns the ranks' total residual."""
    found: dict[str, torch.Tensor] = {}
    for s in sessions:
        for name, x in s.rank.memory.buffers[ErrorFeedback.residual].items():
            found[name] = found.get(name, torch.zeros_like(x)) + x
    return found


def test_an_impossible_number_of_ranks_is_refused_without_effect() -> None:
    with Crowd(setting(HierarchicalLocalSGD(group=2), ranks=4)) as crowd:
        crowd.reach(3)
        crowd.resize(0, 1, 2)
        assert crowd.said("refused")[0]["reason"].startswith("group=2 does not divide 3 ranks")
        crowd.reach(crowd.first.rank.step + 3)
        assert len(crowd.stopped()) == 4 and not crowd.said("members")


def test_a_new_rank_leaves_if_another_is_lost_before_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_before_it_meets(monkeypatch, 1)
    with Crowd(setting(DDP(), ranks=3, on_death="go on")) as crowd:
        crowd.reach(4)
        crowd.resize(0, 1, 3)
        assert crowd.said("refused")[0]["reason"] == "ranks=3: a rank or a connection was lost in the join; ask again"
        assert crowd.every[3].join(60) and crowd.every[3].phase == "stopped" and crowd.every[3].error is None
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.members for s in crowd.there] == [(0, 2)] * 2, "who was to be taken out is still there"
        text = crowd.said("members")[0]["text"]
        assert text.startswith("rank 1 is lost; ranks 0, 2 went on") and "joining rank 3 is left out" in text
        crowd.resize(0, 4)
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.member for s in crowd.stopped()] == [0, 4]


@pytest.mark.parametrize("more", [{"ranks": 1}, {"ranks": 2, "on_death": "end"}], ids=["alone", "on death end"])
def test_the_loss_of_a_new_rank_does_not_end_the_run(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = more["ranks"]
    gone_before_it_meets(monkeypatch, ranks)
    with Crowd(setting(DDP(), **more)) as crowd:
        crowd.reach(4)
        crowd.resize(*range(ranks + 1))
        assert crowd.said("refused")[0]["reason"].endswith("a rank or a connection was lost in the join; ask again")
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.members for s in crowd.there] == [tuple(range(ranks))] * ranks
        again = {"kind": "resize", "members": list(range(ranks + 1)), "id": f"resize {tuple(range(ranks + 1))}"}
        for n, asked in enumerate([again, {**again, "id": "another"}]):  # repeated, then with the lost rank
            crowd.first.request(asked)
            crowd.until(lambda n=n: len(crowd.said("refused")) > n + 1)
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.members for s in crowd.there] == [tuple(range(ranks))] * ranks
        lost = "a rank or a connection was lost in the join", f"rank {ranks} is not there any more"
        reasons = [said["reason"] for said in crowd.said("refused")]
        assert reasons[1:] == [f"ranks={ranks + 1}: {why}; ask again" for why in lost]
        crowd.resize(*range(ranks), ranks + 1)
        crowd.reach(crowd.first.rank.step + 3)
        assert len(crowd.stopped()) == ranks + 1


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=3)], ids=lambda s: type(s).__name__)
def test_a_run_goes_on_without_a_rank_lost_while_replicas_come_together(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is lost before it has reported its arrival. The other ranks vote, and learn that they must ask again."""
    gone_before_it_meets(monkeypatch, 1, "together")
    with Crowd(setting(strategy, ranks=3, on_death="go on")) as crowd:
        crowd.reach(4)
        crowd.resize(0, 1, 2, 3)
        assert crowd.said("refused")[0]["reason"] == "ranks=4: rank 1 is not there any more; ask again"
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.members for s in crowd.there] == [(0, 2)] * 2
        crowd.resize(0, 2, 3)
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.member for s in crowd.stopped()] == [0, 2, 3]


@pytest.mark.parametrize(
    "more",
    [{"strategy": ZeRO1(), "ranks": 3}, {"strategy": ZeRO3(), "ranks": 3},
     {"strategy": DDP(), "partition": Pipeline()}, {"strategy": DDP(), "partition": Tensor()}],
    ids=["ZeRO1", "ZeRO3", "stages", "slices"],
)  # fmt: skip
def test_a_run_goes_on_without_a_lost_rank_whose_part_the_others_already_have(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint exists, and no other rank had its part before they came together, bit-identically."""
    gone_before_it_meets(monkeypatch, 1, "together")
    had, hashes = {}, {}
    come, put = resizing.gather_state, generation.assemble_model

    def held(run: Any) -> dict[str, torch.Tensor]:
        params = {place.name: place.param.detach().clone().view(-1) for place in run.layout.order}
        return params | {name: x.clone().view(-1) for name, x in read_slots(run.layout, run.optimizer).items()}

    async def comes(run: Any, stay: tuple[int, ...]) -> None:
        await come(run, stay)
        had[run.session.member] = held(run)

    async def puts(run: Any, *rest: Any) -> None:
        await put(run, *rest)
        hashes[run.session.member] = held(run)

    monkeypatch.setattr(resizing, "gather_state", comes)
    monkeypatch.setattr(generation, "assemble_model", puts)
    task = {"task": ByteGPT(width=32, context=16)} if "partition" in more else {}
    e = setting(**task, **more, on_death="go on")
    with Crowd(e) as crowd:
        crowd.reach(4)
        crowd.resize(*((0, 1) if e.ranks == 3 else (0, 1, 2, 3)))
        crowd.reach(crowd.first.rank.step + 3)
        said = crowd.said("members")[0]
        assert said["gone"][0] == 1 and "with the whole model that ranks had gathered" in said["text"]
        assert {m for s in crowd.there for m in s.members} == set(range(e.ranks)) - {1}
    assert set(had) == set(range(e.ranks)) and hashes
    for member, now in hashes.items():
        assert now.keys() == had[member].keys() and all(torch.equal(x, had[member][name]) for name, x in now.items())


@pytest.mark.parametrize("partition", [Whole(), Pipeline()], ids=lambda p: type(p).__name__)
def test_a_resize_is_repeated_with_a_rank_whose_connection_broke(
    partition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose connection broke votes while the other ranks wait for it. They vote with it, and all repeat the
    request.
    """
    used_up, broken = resizing.count_used_up, [1]

    async def breaks(run: Any) -> int:
        used = await used_up(run)
        if run.session.member in broken:
            broken.remove(run.session.member)
            membership.require_alive(SimpleNamespace(check=lambda names: True), [0])  # as if a peer is gone
        return used

    monkeypatch.setattr(resizing, "count_used_up", breaks)
    monkeypatch.setattr("workbench.engine.rank.surviving.REPORT_TIMEOUT", 10 * LIMIT)  # a wait in vain shows
    with Crowd(setting(LocalSGD(every=3), ranks=4, task=ByteGPT(), partition=partition, on_death="go on")) as crowd:
        crowd.reach(4)
        crowd.resize(0, 1)
        assert not broken
        crowd.reach(crowd.first.rank.step + 3)
        assert [s.member for s in crowd.stopped()] == [0, 1]
        assert [said["members"] for said in crowd.said("members")] == [[0, 1, 2, 3], [0, 1]]


def test_a_new_rank_preempted_while_its_generation_forms_leaves_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather, told = membership.await_reports, []

    def gathered(store: Any, what: str, place: int | None, processes: Any, look: Any, *more: Any) -> None:
        gather(store, what, place, processes, look, *more)
        if what == "meet" and look.args[0].member == 2 and not told:
            told.append(look.args[0])
            told[0].preempt()

    monkeypatch.setattr(membership, "await_reports", gathered)
    with Crowd(setting(DDP(), on_death="end")) as crowd:
        crowd.reach(4)
        crowd.call(3)
        crowd.until(lambda: crowd.every[2].phase == "waiting")
        crowd.first.request({"kind": "resize", "members": [0, 1, 2], "id": "r"})
        crowd.until(lambda: told and told[0].join(0))
        crowd.reach(crowd.first.rank.step + 3)
        assert [said["gone"] for said in crowd.said("members")] == [[], [2]]
        assert told[0].phase == "stopped" and [s.member for s in crowd.stopped()] == [0, 1]


def test_a_loss_below_the_runs_first_is_not_diverged_for_new_or_old_ranks() -> None:
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
