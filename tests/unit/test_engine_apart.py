"""Tests ranks without a common step: they meet on request, lose no update, and end cleanly."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import batch, ended, experiment, fingerprint, live, mse, poisoned, run, toy, weights
from tests.sim.virtual import seconds
from tests.thinned import thinned
from workbench import simulate
from workbench.engine.control.background import Background
from workbench.engine.p2p.mailbox import Mailbox
from workbench.engine.rank.session import Session
from workbench.fabric import Slow
from workbench.host.placement.canonical_state import hash_model_state, list_optimizer_tensors
from workbench.rank import Rank
from workbench.settings import Change, to_plain
from workbench.strategies import (
    AsyncServer,
    Hogwild,
    LocalSGD,
    ShadowBMUF,
    ShadowEASGD,
    ShadowMA,
    Strategy,
    SyncServer,
)  # fmt: skip

pytestmark = pytest.mark.ranks

APART = [
    ShadowMA(),
    ShadowBMUF(),
    ShadowEASGD(),
    ShadowEASGD(servers=1),
    AsyncServer(),
    SyncServer(),
    AsyncServer(servers=1, push=2, fetch=3),
    Hogwild(),
]
apart = pytest.mark.parametrize("strategy", APART, ids=str)
SLOW = (Slow(rank=1, factor=3.0),)


def until(ask: Any, sessions: list[Session] = (), within: float = 60.0) -> None:  # type: ignore[assignment]
    """Waits for `ask`. Fails the test with the ranks' status if a rank fails or time runs out."""
    end = time.monotonic() + within
    while not ask():
        assert not [s.error for s in sessions if s.error], [s.error["traceback"] for s in sessions if s.error]
        assert time.monotonic() < end, [s.status() for s in sessions]
        time.sleep(0.005)


@pytest.fixture(scope="module")
def _opened_once() -> None:
    """Opens what torch opens once in a process and keeps."""
    run(experiment(2, 1))


def opened() -> tuple[int, int]:
    """Counts this process's threads and descriptors, after collecting ended sessions."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_opened_once: None) -> Iterator[None]:
    """Checks that a test leaves no thread and no descriptor."""
    before = opened()
    yield
    end = time.monotonic() + 60
    while (now := opened()) > before and time.monotonic() < end:
        time.sleep(0.05)
    assert now[0] <= before[0] and now[1] <= before[1], (before, now, [t.name for t in threading.enumerate()])


def steered(strategy: Strategy, ranks: int = 3, steps: int = 0, **rest: Any) -> list[Session]:
    """Returns training ranks. One of these is 3 times slower."""
    rest = {"pace": 6.0, **rest}
    sessions = live(experiment(ranks, steps, strategy=strategy, **rest).set("faults", SLOW))
    until(lambda: sessions[0].rank.step > 6, sessions)
    return sessions


def with_servers(trainers: int, strategy: Strategy) -> int:
    return trainers + getattr(strategy, "servers", 0)


def plain(strategy: Strategy | str) -> Any:
    """Returns the strategy in the form of an order."""
    return strategy if isinstance(strategy, str) else to_plain(strategy)


def over(sessions: list[Session]) -> None:
    for s in sessions:
        s.abort()
    ended(sessions)


@pytest.mark.parametrize("strategy", [s for s in APART if not isinstance(s, SyncServer)], ids=str)
def test_no_rank_waits_for_a_slow_one_and_all_make_their_steps(strategy: Strategy) -> None:
    """The slow rank waits in its fourth step until the other ranks have made all steps. It deadlocks if they wait."""
    goes_on, fourth = threading.Event(), batch(1, 3, 0)[0]

    def loss(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if torch.equal(pair[0], fourth):
            goes_on.wait(100)
        return mse(model, pair)

    sessions = live(experiment(with_servers(3, strategy), 24, strategy=strategy, task=toy(loss=loss), pace=5.0))
    try:
        until(lambda: [steps_of(sessions[r]) for r in (0, 2)] == [24, 24], sessions)
        assert steps_of(sessions[1]) == 3
        goes_on.set()
        ended(sessions)
        assert [steps_of(s) for s in sessions[:3]] == [24, 24, 24] and {s.phase for s in sessions} == {"done"}
    finally:
        goes_on.set()
        over(sessions)


def steps_of(session: Session) -> int:
    return sum(r[1] == "step" for r in session.record)


@apart
def test_orders_reach_all_ranks(strategy: Strategy) -> None:
    sessions = steered(strategy)
    try:
        turns = [("lr", 0.01), ("bucket_mb", 0.02), ("bandwidth", 200.0), ("eval_every", 7)]
        for k, (path, value) in enumerate(turns):
            sessions[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k, sessions)
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions), sessions)
        assert len({(s.experiment.lr, s.experiment.bucket_mb, s.experiment.eval_every) for s in sessions}) == 1
        trainers = [s for s in sessions if s.rank.role == "trainer"]
        steps = [s.rank.step for s in trainers]
        time.sleep(0.7)
        assert [s.rank.step for s in trainers] == steps
        sessions[0].request({"kind": "step", "n": 2})
        until(lambda: [s.rank.step for s in trainers] == [n + 2 for n in steps], sessions)
        until(lambda: all(s.phase == "paused" for s in sessions), sessions)
        sessions[0].request({"kind": "resume"})
        until(lambda: all(s.rank.step > n + 4 for s, n in zip(trainers, steps, strict=True)), sessions)
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert {s.phase for s in sessions} == {"stopped"}
    finally:
        over(sessions)


@apart
def test_live_switches_leave_parameters_equal(strategy: Strategy) -> None:
    sessions = steered(strategy)
    try:
        for k, other in enumerate(["DDP", strategy, "Gossip", strategy, "LocalSGD", strategy, "DDP"]):
            sessions[0].request({"kind": "change", "id": str(k), "path": "strategy", "value": plain(other)})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k, sessions)
            step = sessions[0].rank.step
            until(lambda step=step: sessions[0].rank.step > step + 5, sessions)
        assert not sessions[0].record.noted("refused")
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions), sessions)
        assert len({s.rank.step for s in sessions}) == 1, "ranks in lockstep count alike"
        assert len({hash_model_state(s.layout) for s in sessions}) == 1
        assert len({fingerprint(list_optimizer_tensors(s.layout, s.optimizer)) for s in sessions}) == 1
    finally:
        over(sessions)


@apart
def test_planned_changes_work_without_a_common_step(strategy: Strategy) -> None:
    plan = (Change(4, "lr", 0.01), Change(9, "strategy", "DDP"), Change(12, "strategy", plain(strategy)),
            Change(15, "lr", 0.02))  # fmt: skip
    sessions = run(experiment(3, 25, pace=4.0, strategy=strategy).set("faults", SLOW), *plan)
    told = [json.loads(m[3])["id"] for m in sessions[0].record.noted("change")]
    assert told == ["planned 4", "planned 9", "planned 12", "planned 15"]
    assert {s.experiment.lr for s in sessions} == {0.02} and {s.phase for s in sessions} == {"done"}


def test_strategies_requested_at_once_are_applied_one_after_another_at_one_step() -> None:
    sessions = live(experiment(3, 0, pace=4.0))
    try:
        until(lambda: sessions[0].rank.step > 4, sessions)
        for k, name in enumerate(["ShadowMA", "AsyncServer", "Gossip", "AsyncServer", "LocalSGD"]):
            sessions[0].request({"kind": "change", "id": str(k), "path": "strategy", "value": name})
        until(lambda: len(sessions[0].record.noted("change")) > 4, sessions)
        step = sessions[0].record.noted("change")[-1][0]
        until(lambda: all(s.rank.step > step + 4 for s in sessions), sessions)
        for s in sessions:
            steps = [r[0] for r in s.record if r[1] == "step"]
            assert steps == sorted(set(steps)), "no step twice"
    finally:
        over(sessions)


@apart
def test_an_abort_frees_every_thread(strategy: Strategy) -> None:
    sessions = steered(strategy, pace=30.0)
    sessions[2].abort()
    ended(sessions)


@pytest.mark.parametrize(("strategy", "rank"), thinned(product(APART, [0, 2]), of=3, long=3))
def test_a_failing_rank_frees_the_other_ranks_and_is_named(strategy: Strategy, rank: int) -> None:
    ranks = with_servers(3, strategy)
    sessions = live(experiment(ranks, 0, task=poisoned(rank, 5), strategy=strategy, pace=4.0))
    ended(sessions)
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["step"], e["text"]) for e in causes] == [(rank, 5, "a bad example")]


def test_a_rank_without_a_message_connection_learns_of_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine rank 0 may fail before it connects to the last rank, which would then train for ever."""
    monkeypatch.setattr(Mailbox, "connect_ranks", lambda mailbox, ranks: None)

    sessions = live(experiment(3, 0, task=poisoned(0, 5), strategy=Hogwild(), pace=4.0))
    ended(sessions)
    assert [s.error["text"] for s in sessions if s.error and not s.error["consequence"]] == ["a bad example"]


@dataclass(frozen=True, kw_only=True)
class StumblingShadow(ShadowMA):
    """Fails in its background, on rank 1 in its third round."""

    async def background(self, rank: Rank, state: Any) -> None:
        rounds = 0
        while await rank.again():
            rounds += 1
            if rank.index == 1 and rounds == 3:
                raise ValueError("stumbled")
            for bucket in await rank.params():
                await rank.all_reduce(bucket.data.clone(), "sum", bucket.name)


def test_a_background_that_fails_fails_the_run() -> None:
    sessions = live(experiment(3, 0, strategy=StumblingShadow(), pace=4.0))
    ended(sessions)
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["text"]) for e in causes] == [(1, "stumbled")]


def test_no_rank_cuts_its_wires_while_another_is_in_its_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo may not notice that a group was cut in the middle of a round, and keeps its thread for 10 minutes."""
    ends, cuts, again, cut = [], [], Background._next_step, Session.cut_connections

    def late(background: Background, rest: float, alone: bool) -> int:
        goes_on = again(background, rest, alone)
        if not goes_on and background.run.rank.id == 1:
            time.sleep(0.7)  # as if the report of the sent bytes came late
        if not goes_on:
            ends.append(time.monotonic())
        return goes_on

    def noted(session: Session) -> None:
        cuts.append(time.monotonic())
        cut(session)

    monkeypatch.setattr(Background, "_next_step", late)
    monkeypatch.setattr(Session, "cut_connections", noted)
    sessions = live(experiment(3, 0, task=poisoned(2, 5), strategy=ShadowMA(), pace=4.0))
    ended(sessions)
    assert len(ends) == len(cuts) == 3 and min(cuts) > max(ends)


def test_a_single_rank_that_fails_next_to_its_background_ends() -> None:
    (session,) = live(experiment(1, 0, task=poisoned(0, 5), strategy=AsyncServer()))
    ended([session])
    assert session.error is not None and session.error["text"] == "a bad example"
    assert session.phase == "failed" and all(wire.group is None for wire in session.wires), "its wires are given back"


@dataclass(frozen=True, kw_only=True)
class MisplacedUpdate(ShadowMA):
    """Calls in its background a verb that belongs in a step."""

    async def background(self, rank: Rank, state: Any) -> None:
        await rank.update()


def test_a_misplaced_verb_in_a_background_is_an_error() -> None:
    sessions = live(experiment(2, 0, strategy=MisplacedUpdate()))
    ended(sessions)
    assert any("`update` belongs in `step`" in s.error["text"] for s in sessions if s.error)


class Heap(nn.Module):
    """Many parameters with a gradient that is the rank's own constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(150_000)), nn.Parameter(torch.zeros(90_000))

    def forward(self, pull: torch.Tensor) -> torch.Tensor:
        return (self.a.sum() + 2 * self.b.sum()) * pull


def test_no_update_is_lost_to_the_shadow() -> None:
    """The sum of all ranks' parameters is the optimizers' result, whenever the shadow writes."""

    def data(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
        return [torch.tensor(float(rank + 1))]

    task = toy(partial(torch.optim.SGD, lr=0.001), model=Heap, loss=lambda m, pull: m(pull), data=data, evaluate=None)
    steps = 300
    sessions = run(experiment(3, steps, task=task, strategy=ShadowMA(), bucket_mb=0.4))
    rounds = sum(name == "all_reduce shadow bucket 0" for _, name, _ in sessions[0].record.comm())
    assert rounds > 5, "the shadow was at work"
    total = torch.stack([weights(s) for s in sessions]).sum(0)
    moved = -0.001 * steps * (1 + 2 + 3)
    torch.testing.assert_close(total[:150_000], torch.full((150_000,), moved).double(), rtol=1e-4, atol=0)
    torch.testing.assert_close(total[150_000:], torch.full((90_000,), 2 * moved).double(), rtol=1e-4, atol=0)


def test_a_round_of_the_shadow_pulls_ranks_together_by_alpha() -> None:
    plain = toy(partial(torch.optim.SGD, lr=0.3))
    left = {}
    for alpha in (0.0, 0.5, 1.0):
        chosen = experiment(3, 30, task=plain, strategy=ShadowMA(alpha=alpha), pace=4.0)  # time for many rounds
        sessions = run(chosen, Change(6, "lr", 1e-30))
        apart = torch.stack([weights(s) for s in sessions])
        left[alpha] = float((apart - apart.mean(0)).norm())
    assert left[0.0] > 1e-2 and left[0.5] < left[0.0] * 0.5**5 and left[1.0] < 1e-6 * left[0.0]


def test_evaluation_waits_for_no_rank_and_uses_the_last_average() -> None:
    chosen = experiment(3, 0, strategy=ShadowMA(), pace=6.0, eval_every=5)
    sessions = live(chosen, (Change(10, "faults", [{"Freeze": {"rank": 2, "seconds": 60}}]),))

    def evals() -> list[Any]:
        return [r for r in sessions[0].record if r[1] == "eval" and r[0] > 10]

    try:
        until(lambda: sessions[0].record.noted("change"), sessions)
        until(lambda: len(evals()) >= 2, sessions)
        stood = sessions[2].rank.step
        until(lambda: len(evals()) >= 6, sessions)
        assert sessions[2].rank.step == stood, "it stands still all the while"
        held_out = [(step, v) for step, name, _, v in sessions[0].record.samples if name == "held_out"]
        assert len(held_out) > 5 and held_out[-1][1] < held_out[0][1]
        assert not [1 for s in sessions[1:] for _, name, *_ in s.record.samples[1:] if name == "held_out"]
    finally:
        over(sessions)


def test_the_shadow_costs_no_time_on_a_slow_link() -> None:
    """Ranks make steps and do not wait while an average is in flight. On a virtual clock it costs nothing."""
    e = experiment(4, 24, strategy=ShadowMA(), pace=30.0).set("bandwidth", 0.4)
    for s in run(e):
        buckets = len(s.layout.buckets)
        first = sorted((r[4], r[5]) for r in s.record if r[1] == "comm")[:buckets]
        began, ended_at = first[0][0], first[-1][1]
        assert ended_at - began > 0.5, "an averaging takes about twenty steps"
        assert sum(began < r[4] and r[5] < ended_at for r in s.record if r[1] == "step") > 2
        assert not [r for r in s.record if r[1] == "wait"]
    alone, shadow = (simulate(e.set("strategy", strategy)) for strategy in (LocalSGD(every=256), ShadowMA()))
    for r in range(4):
        assert seconds(shadow, r).tolist() == pytest.approx(seconds(alone, r).tolist())
