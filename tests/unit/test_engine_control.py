"""Tests control of a run: changes, pause, single steps, stop, faults, failures."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import batch as examples
from tests.ranks import ended, experiment, fingerprint, live, mse, run, toy
from workbench.compressors import TopK
from workbench.engine.rank.session import Session
from workbench.fabric import Freeze, Slow
from workbench.host.placement.canonical_state import list_optimizer_tensors
from workbench.rank import Rank
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, Strategy, StreamingDiLoCo

pytestmark = pytest.mark.ranks


def until(ask: object, within: float = 60.0) -> None:
    end = time.monotonic() + within
    while not ask():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def three() -> list[Session]:
    sessions = live(experiment(3, 0, pace=10.0))
    until(lambda: all(s.rank.step > 2 for s in sessions))
    yield sessions
    for s in sessions:
        s.abort()
    ended(sessions)


def test_a_change_acts_on_all_ranks_before_the_same_step(three: list[Session]) -> None:
    three[0].request({"kind": "change", "id": "a", "path": "strategy", "value": {"LocalSGD": {"every": 3}}})
    until(lambda: three[0].record.noted("change"))
    step = three[0].record.noted("change")[0][0]
    until(lambda: three[0].rank.step > step + 4)
    for s in three:
        names = {r[0]: r[2] for r in s.record if r[1] == "step"}
        assert names[step - 1] == "DDP" and names[step] == "LocalSGD"


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=2), StreamingDiLoCo(every=4, fragments=2)], ids=repr)
def test_ranks_of_one_host_meet_only_for_a_pending_ticket(strategy: Strategy) -> None:
    sessions = live(experiment(3, 0, strategy=strategy, pace=5.0))
    try:
        until(lambda: all(s.rank.step > 2 for s in sessions))
        asked = [0] * 3
        for k, s in enumerate(sessions):

            def counted(wait: float = 0.0, k: int = k, ask: Any = s.training.control_channel.publish_requests) -> None:
                asked[k] += 1
                ask(wait)

            s.training.control_channel.publish_requests = counted
        step = sessions[0].rank.step
        until(lambda: all(s.rank.step > step + 20 for s in sessions))
        assert asked == [0, 0, 0]
        sessions[0].request({"kind": "change", "id": "a", "path": "bucket_mb", "value": 0.05})
        until(lambda: all(s.experiment.bucket_mb == 0.05 for s in sessions))
        assert asked == [1, 1, 1]
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert asked == [2, 2, 2]
    finally:
        for s in sessions:
            s.abort()


def test_a_change_acts_at_most_two_steps_later(three: list[Session]) -> None:
    """A change waits for the current step, and for one more if rank 0 has already read its inbox.

    docs/project/benchmarks.md has the time in milliseconds.
    """
    for k in range(12):
        three[0].request({"kind": "change", "id": str(k), "path": "bucket_mb", "value": 0.01 + 0.01 * k})
        asked = three[0].rank.step
        until(lambda k=k: len(three[0].record.noted("change")) > k)
        assert three[0].record.noted("change")[k][0] <= asked + 2


def test_a_refused_change_has_a_reason_and_training_goes_on(three: list[Session]) -> None:
    three[0].request({"kind": "change", "id": "x", "path": "strategy.every", "value": 4})
    until(lambda: three[0].record.noted("refused"))
    assert "no such knob" in json.loads(three[0].record.noted("refused")[0][3])["reason"]
    step = three[0].rank.step
    until(lambda: three[0].rank.step > step + 2)


def test_pause_single_step_resume(three: list[Session]) -> None:
    three[0].request({"kind": "pause"})
    until(lambda: all(s.phase == "paused" for s in three))
    step = three[0].rank.step
    time.sleep(0.7)
    assert {s.rank.step for s in three} == {step}
    three[0].request({"kind": "step", "n": 2})
    until(lambda: all(s.rank.step == step + 2 and s.phase == "paused" for s in three))
    three[0].request({"kind": "resume"})
    until(lambda: all(s.rank.step > step + 4 for s in three))


def test_stop_ends_all_ranks_at_the_same_step(three: list[Session]) -> None:
    three[0].request({"kind": "stop"})
    ended(three)
    assert {s.phase for s in three} == {"stopped"} and len({s.rank.step for s in three}) == 1


def test_a_requested_abort_is_no_failure_even_while_paused(three: list[Session]) -> None:
    three[0].request({"kind": "pause"})
    until(lambda: all(s.phase == "paused" for s in three))
    for s in three:
        s.abort(asked=True)
    ended(three)
    assert {s.phase for s in three} == {"stopped"} and not any(s.error for s in three)


def test_a_requested_abort_frees_a_blocked_rank_without_failure() -> None:
    hang, over = threading.Event(), threading.Event()

    def loss(model: torch.nn.Module, pair: tuple) -> torch.Tensor:
        if hang.is_set() and threading.current_thread().name.startswith("rank 1"):
            over.wait(120)  # the user's own code hangs and reacts to nothing
        return mse(model, pair)

    sessions = live(experiment(2, 0, task=toy(loss=loss), pace=5.0))
    until(lambda: all(s.rank.step > 2 for s in sessions))
    hang.set()
    until(lambda: "wait" in sessions[0].training.host.op)
    time.sleep(0.2)
    sessions[0].request({"kind": "stop"})
    for s in sessions:
        s.hurry()
    for s in sessions:
        s.abort(asked=True)
    assert sessions[0].join(60) and not sessions[1].join(0), "it does not wait for the other, who hangs on"
    over.set()
    assert sessions[1].join(60)
    assert {s.phase for s in sessions} == {"stopped"}


def test_a_failing_rank_frees_the_other_ranks_and_is_named() -> None:
    def loss(model: torch.nn.Module, pair: tuple) -> torch.Tensor:
        if torch.equal(pair[0], poison):
            raise ValueError("a bad example")
        return mse(model, pair)

    poison = examples(1, 5, 0)[0]
    sessions = live(experiment(3, 50, task=toy(loss=loss)))
    assert all(s.join(30) for s in sessions), "the wires' own time limit is ten minutes"
    cause = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["step"], e["op"], e["text"]) for e in cause] == [(1, 5, "forward", "a bad example")]


def test_a_loss_that_is_not_finite_pauses_the_run_and_names_rank_and_step() -> None:
    def loss(model: torch.nn.Module, pair: tuple) -> torch.Tensor:
        bad = torch.equal(pair[0], examples(1, 4, 0)[0])
        return mse(model, pair) * (float("nan") if bad else 1.0)

    sessions = live(experiment(2, 0, task=toy(loss=loss)))
    until(lambda: all(s.phase == "paused" for s in sessions))
    first = min((m[0], s.rank.index) for s in sessions for m in s.record.noted("nan"))
    assert first == (4, 1)
    for s in sessions:
        s.abort()
        assert s.join(20)


@dataclass(frozen=True, kw_only=True)
class EveryOther(Strategy):
    """Computes in every second step only, like a pipeline stage without loss, or a rank that catches up."""

    async def step(self, rank: Rank, state: Any) -> None:
        if rank.step % 2 == 0:
            await rank.forward()
            await rank.backward()
            await rank.update()


def test_a_step_without_a_forward_has_no_loss_and_no_nan_mark() -> None:
    for s in run(experiment(2, 6, strategy=EveryOther())):
        assert s.phase == "done" and not s.record.noted("nan")
        assert [step for step, name, *_ in s.record.samples if name == "loss"] == [0, 2, 4]


def test_planned_changes_replay_a_run_exactly() -> None:
    plan = (Change(4, "strategy", "LocalSGD"), Change(9, "strategy", "DDP"), Change(11, "compressor", "TopK"),
            Change(15, "batch", 2), Change(16, "lr", 0.01))  # fmt: skip

    def data(rank: int, ranks: int, seed: int, batch: int = 4) -> list:
        return [examples(rank, step, seed, batch) for step in range(64)]

    one, two = (run(experiment(2, 20, batch=4, task=toy(data=data)), *plan) for _ in range(2))
    assert [s.record.losses() for s in one] == [s.record.losses() for s in two]


def test_a_switch_is_its_own_span_with_its_bytes_and_outside_the_step() -> None:
    s = run(experiment(2, 12, strategy=LocalSGD(every=5)), Change(7, "strategy", "DDP"))[0]
    (span,) = [r for r in s.record if r[1] == "switch"]
    assert span[6] > 0
    assert not [r for r in s.record if r[1] == "step" and r[4] < span[5] and r[5] > span[4]]


def test_a_change_records_its_bytes_on_all_ranks_and_its_duration() -> None:
    plan = Change(7, "strategy", "DDP"), Change(9, "lr", 0.01)
    sessions = run(experiment(2, 12, strategy=LocalSGD(every=5)), *plan)
    handed, set_ = [json.loads(mark[3]) for mark in sessions[0].record.noted("change")]
    spans = [row for s in sessions for row in s.record if row[1] == "switch"]
    assert handed["nbytes"] == sum(row[6] for row in spans) > 0
    assert handed["seconds"] >= spans[0][5] - spans[0][4] > 0
    assert set_["nbytes"] == 0


def test_slow_and_freeze_faults_delay_a_rank_as_set() -> None:
    slow = Slow(rank=1, factor=3.0, phase="backward")
    s = run(experiment(2, 8, pace=90.0).set("faults", (slow,)))
    # Load on the machine makes a span longer, never shorter. So the shortest span is undisturbed.
    length = [min(r[5] - r[4] for r in x.record if r[2] == "backward") for x in s]
    assert length[1] / length[0] == pytest.approx(3.0, rel=0.1)
    s = run(experiment(2, 8), Change(3, "faults", [{"Freeze": {"rank": 0, "seconds": 0.3}}]))
    waited = sum(r[5] - r[4] for r in s[1].record if r[0] == 3 and r[1] == "wait")
    assert waited > 0.25
    assert Freeze(rank=0, seconds=0.3).pause(0) == 0.3


def test_a_residual_of_gradients_is_dropped_for_displacements() -> None:
    s = run(experiment(2, 10, compressor=TopK.usual()), Change(5, "strategy", "LocalSGD"))[0]
    (mark,) = s.record.noted("residual")
    assert json.loads(mark[3])["dropped"] > 0


def test_ranks_share_one_optimizer_state_after_leaving_local_sgd() -> None:
    sessions = run(experiment(3, 10, strategy=LocalSGD(every=4)), Change(6, "strategy", "DDP"), Change(6, "lr", 1e-9))
    assert len({fingerprint(list_optimizer_tensors(s.layout, s.optimizer)) for s in sessions}) == 1


def test_a_rank_reports_the_time_of_evaluations_so_that_a_stop_waits() -> None:
    def slow(model: Any) -> float:
        time.sleep(0.4)
        return 1.0

    sessions = run(experiment(2, 4, eval_every=2, task=toy(evaluate=slow)))
    assert all(0.4 <= s.status()["step_s"] < 30 for s in sessions)


def test_a_change_during_an_evaluation_acts_before_the_next_step() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slowly(model: Any) -> dict[str, float]:
        if sessions and sessions[0].rank.step == 6:
            inside.set()
            assert go_on.wait(60)
        return {"loss": 1.0}

    sessions: list[Session] = []
    sessions += live(experiment(3, 0, eval_every=6, task=toy(evaluate=slowly)))
    try:
        assert inside.wait(60)
        sessions[0].request({"kind": "change", "id": "a", "path": "bucket_mb", "value": 0.05})
        go_on.set()
        until(lambda: sessions[0].record.noted("change"))
        assert sessions[0].record.noted("change")[0][0] == 6
    finally:
        for s in sessions:
            s.abort()
        ended(sessions)


def test_ranks_do_not_reread_entries_of_closed_groups(three: list[Session]) -> None:
    """A rank that opens a meeting point reads and keeps all entries: they must not grow with changes."""
    where, port = three[0].store_address
    largest, files = [], []
    for k in range(12):
        value = {"HierarchicalLocalSGD": {"group": 3 if k % 2 else 1, "every": 2, "group_every": 1}}
        three[0].request({"kind": "change", "id": str(k), "path": "strategy", "value": value})
        until(lambda k=k: len(three[0].record.noted("change")) + len(three[0].record.noted("refused")) > k)
        step = three[0].rank.step
        until(lambda step=step: all(s.rank.step > step + 4 for s in three))
        sizes = [file.stat().st_size for file in Path(where).parent.glob(Path(where).name + "*")]
        largest.append(max(sizes))
        files.append(len(sizes))
    assert not port and three[0].record.noted("change")
    assert largest[-1] <= largest[3] and files[-1] <= files[3], (largest, files)
