"""Tests the loss of a rank: survivors vote, agree on one state and go on, on real ranks, under every strategy."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ended, live, shipped
from workbench.engine.control import membership
from workbench.engine.control.membership import LeftBehind, describe_process, hold_vote
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Slow
from workbench.host.elastic.recovery_sources import has_parts
from workbench.host.elastic.reentry import choose_survivors
from workbench.host.elastic.voting import Quorum, RankReport
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, HierarchicalLocalSGD, LocalSGD, Strategy
from workbench.tasks import ClickThrough, Digits, Task

NOBODY = ["elsewhere", 1, 0.0]


class Hurried(dict[str, str]):
    """A store in which place 1 joins, and its process dies, right after the first check for it."""

    set, get = dict.__setitem__, dict.__getitem__

    def check(self, keys: list[str]) -> bool:
        there = keys[0] in self
        if keys == ["meet 1"]:
            self["meet 1"] = self["gone 1"] = "1"
        return there


def test_a_place_that_joined_and_died_counts_as_joined_for_all() -> None:
    store = Hurried()
    membership.await_reports(store, "meet", 0, [describe_process(), NOBODY], lambda: None)
    assert store.keys() >= {"meet 0", "meet 1"}, "else this one votes alone while the others, who saw it, go on"
    with pytest.raises(ConnectionError, match="rank 7 is gone before it had opened its end"):
        membership.await_reports(store, "open", 0, [describe_process(), NOBODY], lambda: None, (4, 7))


def said(member: int, step: int, **more: Any) -> RankReport:
    rest = {"changes": 0, "trained": True, "requests": [], "answers": [], "paused": False, "credit": 0, "settings": {},
            "process": describe_process()}  # fmt: skip
    return RankReport(member, step, **{**rest, **more})


def voted(folder: Path, each: dict[int, RankReport], size: int, patience: float = 20.0) -> dict[int, Any]:
    """Returns the outcome of the vote of each place, run on threads; an error if it raised one."""
    found: dict[int, Any] = {}

    def one(place: int) -> None:
        store = dist.FileStore(str(folder / "store"), -1)
        try:
            found[place] = hold_vote(store, place, size, each[place], patience, lambda: None)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in each]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return found


def test_all_survivors_get_the_same_result_of_the_vote(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    membership.report_gone(store, 2)
    heard = voted(tmp_path, {0: said(5, 7), 1: said(6, 8), 3: said(9, 8)}, 4)
    assert heard[0] == heard[1] == heard[3]
    came = heard[0].make_membership((0, 1, 3))
    assert came.members == (5, 6, 9) and came.furthest == (1, 2) and came.step == 8
    assert heard[0].furthest_report.member == 6 and heard[0].remaining_places == [1, 3, 0]


def test_a_vote_does_not_wait_for_a_dead_process(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    membership.store_process(store, 1, [describe_process()[0], 2**22 + 1, 0.0])  # no such pid
    assert list(voted(tmp_path, {0: said(0, 3)}, 2, patience=600.0)[0].by_place) == [0]


def test_a_silent_rank_is_left_behind_and_learns_of_it(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    membership.store_process(store, 1, NOBODY)
    assert list(voted(tmp_path, {0: said(0, 3)}, 2, patience=0.3)[0].by_place) == [0]
    late = voted(tmp_path, {1: said(1, 3)}, 2)[1]
    assert isinstance(late, LeftBehind) and "the other ranks went on without rank 1" in str(late)


def test_requests_to_some_ranks_are_made_by_all_but_never_twice(tmp_path: Path) -> None:
    one, two = {"id": "a", "kind": "change"}, {"id": "b", "kind": "pause"}
    heard = voted(tmp_path, {0: said(0, 4, requests=[one, two]), 1: said(1, 5, answers=["a"], requests=[two])}, 2)
    assert heard[0].list_requests() == heard[1].list_requests() == [two]


def test_a_vote_is_described_in_words() -> None:
    apart = Quorum({0: said(0, 25), 1: said(1, 25), 3: said(3, 24)})
    assert apart.vote_rows == [[0, 25], [1, 25], [3, 24]]
    assert apart.vote_text == "ranks 0, 1 before step 25, rank 3 before step 24"
    assert Quorum({0: said(0, 7), 1: said(4, 7)}).vote_text == "ranks 0, 4 before step 7"


def test_as_many_ranks_go_on_as_the_strategy_permits() -> None:
    e = Experiment(task=Digits(), strategy=HierarchicalLocalSGD(group=2), ranks=6).checked()
    fewer, places = choose_survivors(e, [5, 0, 1, 2, 3])
    assert (fewer.ranks, places) == (4, (0, 1, 2, 5))
    with pytest.raises(
        KnobError, match="1 of 6 ranks are left, and these settings do not fit them: group=2 does not divide 1"
    ):
        choose_survivors(e, [3])


def test_faults_stay_with_their_ranks() -> None:
    e = Experiment(task=Digits(), ranks=4).set("fabric.faults", (Slow(rank=1), Slow(rank=3), Slow(rank=2)))
    fewer, _ = choose_survivors(e, [0, 2, 3])
    assert [f.rank for f in fewer.fabric.faults] == [2, 1]


# -- on real ranks


def lost(e: Experiment, victim: int, at: int = 8, changes: tuple[Change, ...] = ()) -> tuple[list[Session], dict]:
    """Runs `e` and aborts `victim` at about step `at`; returns (survivors, the Mark of the loss).

    Out of lockstep the victim may be ahead, so this waits until the other ranks are at most one step before `at`.
    """
    sessions = live(e, changes)
    while any(s.rank.step < at - (s is not sessions[victim]) for s in sessions) and not sessions[victim].join(0.001):
        pass
    sessions[victim].abort()
    ended(sessions, 100)
    left = [s for s in sessions if s.member != victim]
    for s in left:
        assert s.error is None, s.error["traceback"]
    marks = [json.loads(m[3]) for s in left for m in s.record.noted("members")]
    assert len(marks) == 1
    return [s for s in left if s.member not in marks[0]["spare"]], marks[0]


def setting(strategy: Strategy, **more: Any) -> Experiment:
    task = ClickThrough() if strategy.tables else Digits()
    rest = {"task": task, "ranks": 4, "steps": 24, "eval_every": 10, "on_death": "go on", "seed": 3}
    return Experiment(strategy=strategy, **{**rest, **more}).checked()


OUTLIVING = [name for name, cls in sorted(shipped(Strategy).items()) if not has_parts(setting(cls()))]


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 2], ids="rank {}".format)
@pytest.mark.parametrize("name", OUTLIVING)
def test_survivors_go_on(name: str, victim: int) -> None:
    left, mark = lost(setting(shipped(Strategy)[name]()), victim)
    assert [s.phase for s in left] == ["done"] * len(left)
    assert [s.rank.size for s in left] == [len(left)] * len(left) and mark["members"] == [s.member for s in left]
    assert victim in mark["gone"] and 7 <= mark["step"] <= 24
    assert max(step for _, step in mark["voted"]) == mark["step"], "the furthest counts"
    assert {member for member, _ in mark["voted"]} == {*mark["members"], *mark["spare"]}
    strategy = left[0].experiment.strategy
    if strategy.lockstep:
        assert {s.rank.step for s in left} == {24}
    if strategy.exact:  # all survivors end with one model
        assert len({hash_model_state(s.layout) for s in left}) == 1
    for s in left:  # the record has no step twice and no counted step is missing
        steps = [row[0] for row in s.record if row[1] == "step"]
        assert len(steps) == len(set(steps))
        assert set(range(mark["step"], s.rank.step)) <= set(steps) or not strategy.lockstep


@pytest.mark.ranks
def test_a_step_that_does_not_count_leaves_no_gradient_to_the_next() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.Parameter(torch.zeros(1))

    task = Task(model=Counts, data=lambda rank, ranks, seed: [torch.ones(1)], loss=lambda model, x: -model.steps.sum(),
                optimizer=lambda params: torch.optim.SGD(params, lr=1.0))  # fmt: skip
    left, _ = lost(Experiment(task=task, strategy=DDP(), ranks=4, steps=60, on_death="go on").checked(), 0, at=20)
    assert [s.model.steps.item() for s in left] == [60.0] * 3


@pytest.mark.ranks
def test_with_on_death_end_the_run_ends() -> None:
    sessions = live(setting(DDP(), on_death="end"))
    while sessions[1].rank.step < 5:
        time.sleep(0.001)
    sessions[1].abort()
    ended(sessions, 60)
    assert [s.phase for s in sessions] == ["failed"] * 4 and not any(s.record.noted("members") for s in sessions)


@pytest.mark.ranks
def test_a_survivor_reports_why_too_few_ranks_are_left() -> None:
    sessions = live(setting(HierarchicalLocalSGD(group=2), ranks=2, steps=0))
    while sessions[1].rank.step < 5:
        time.sleep(0.001)
    sessions[0].abort()
    ended(sessions, 60)
    (said,) = (json.loads(mark[3])["text"] for mark in sessions[1].record.noted("members"))
    assert "the run cannot go on without it: 1 of 2 ranks are left, and these settings do not fit them: group=2" in said
    assert sessions[1].phase == "failed"


@pytest.mark.ranks
def test_ranks_are_lost_in_turn_until_one_is_left() -> None:
    sessions = live(setting(LocalSGD(every=4), steps=0))
    for victim, at in ((0, 6), (3, 14), (1, 22)):
        while sessions[2].rank.step < at:
            time.sleep(0.001)
        sessions[victim].abort()
        assert sessions[victim].join(60)
    while sessions[2].rank.step < 30:
        assert not sessions[2].join(0.001), sessions[2].error
    sessions[2].request({"id": "stop", "kind": "stop"})
    assert sessions[2].join(60) and sessions[2].phase == "stopped" and sessions[2].members == (2,)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["BMUF", "DiLoCo", "SlowMo", "StreamingDiLoCo"])
def test_an_outer_momentum_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, taken = shipped(Strategy)[name], dict[int, dict[str, torch.Tensor]]()
    takes = cls.takes

    def seen(self: Any, rank: Any, state: Any, momentum: Any) -> None:
        taken[rank.id] = {of: x.clone() for of, x in momentum.items()}
        takes(self, rank, state, momentum)

    monkeypatch.setattr(cls, "takes", seen)
    left, _ = lost(setting(cls(every=3)), 1)
    assert len(left) == 3 and set(taken) == {0, 1, 2}
    assert all(x.equal(taken[0][of]) for each in taken.values() for of, x in each.items())
    assert any(x.any() for x in taken[0].values())


@pytest.mark.ranks
def test_two_ranks_are_lost_at_once() -> None:
    sessions = live(setting(DDP(), steps=40))
    while sessions[0].rank.step < 8:
        time.sleep(0.001)
    sessions[1].abort()
    sessions[2].abort()
    ended(sessions, 60)
    assert [sessions[r].phase for r in (0, 3)] == ["done"] * 2 and sessions[0].members == (0, 3)


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1], ids=["who hears for all", "another"])
def test_planned_changes_are_made_once_and_by_all(victim: int) -> None:
    changes = tuple(Change(at, "bucket_mb", mb) for at, mb in ((8, 0.02), (12, 0.5), (16, 0.01)))
    left, _ = lost(setting(DDP(), steps=30), victim, at=8, changes=changes)
    assert {s.experiment.bucket_mb for s in left} == {0.01}
    made = [json.loads(m[3])["value"] for s in left for m in s.record.noted("change")]
    assert made[-2:] == [0.5, 0.01] and len(made) <= 3
    assert len({hash_model_state(s.layout) for s in left}) == 1


@pytest.mark.ranks
def test_a_pause_outlives_a_rank() -> None:
    sessions = live(setting(DDP(), steps=0))
    while sessions[1].rank.step < 5:
        time.sleep(0.001)
    sessions[0].request({"id": "p", "kind": "pause"})
    while sessions[1].phase != "paused":
        time.sleep(0.001)
    sessions[0].abort()
    assert sessions[0].join(60)
    until = time.monotonic() + 30
    while sessions[1].members != (1, 2, 3) or sessions[1].phase != "paused":
        assert time.monotonic() < until, sessions[1].status()
        time.sleep(0.01)
    step = sessions[1].rank.step
    time.sleep(0.3)
    assert sessions[1].rank.step == step
    sessions[1].request({"id": "r", "kind": "resume"})
    while sessions[1].rank.step < step + 5:
        assert not sessions[1].join(0.001), sessions[1].error
    sessions[1].request({"id": "s", "kind": "stop"})
    ended(sessions, 60)
    assert [s.phase for s in sessions[1:]] == ["stopped"] * 3
    assert torch.isfinite(sessions[1].layout.weights[0]).all()
