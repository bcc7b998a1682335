"""Tests how a run ends: how long the kernel waits, and the final state. Uses a fake clock and no ranks."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit import synthetic
from tests.waiting import until
from workbench.cluster.processes.lab_place import host_name
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.cluster.run import evictions
from workbench.cluster.run.rank_errors import RankError
from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_ending import FIRST_STEP_WAIT, LEAVE_TIMEOUT, MAX_STEP_WAIT, RunEnding
from workbench.cluster.run.run_watch import RunWatch
from workbench.cluster.transport.row_encoding import RowBatch
from workbench.experiment import Experiment
from workbench.record import free_memory
from workbench.record.timeline import columns_of
from workbench.run import Run

GRANTED: Any = SimpleNamespace(wait=lambda seconds: None, joining=())  # a request for ranks that they have met


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def status(step: int, step_s: float = 0.1, **rest: Any) -> dict[str, Any]:
    return {"state": "running", "step": step, "step_s": step_s, "over": False, **rest}


def ending(clock: Clock, ranks: int = 2) -> RunEnding:
    return RunEnding(range(ranks), clock)


def lost(rank: int) -> dict[str, Any]:
    text = "Connection closed by peer [127.0.0.1]:1"
    return {"rank": rank, "step": 3, "op": "all_reduce", "type": "RuntimeError", "text": text, "consequence": True}


def first(clock: Clock, it: RunEnding, due: str, within: float) -> float:
    """Returns the seconds until `due` is due."""
    began = clock.now
    while it.next_action() != due:
        clock.now += 0.05
        assert clock.now - began < within, f"{due} not due within {within} s"
    return clock.now - began


@pytest.mark.parametrize(("step_s", "waits"), [(0.01, 1.0), (2.0, 6.0)])
def test_a_stop_waits_for_a_boundary_in_proportion_to_the_steps(clock: Clock, step_s: float, waits: float) -> None:
    it = ending(clock)
    it.take_status(0, status(5, step_s))
    it.note_stop()
    assert first(clock, it, "abort", 10) == pytest.approx(waits, abs=0.11)
    it.note_abort()
    assert first(clock, it, "give up", 20) == pytest.approx(max(LEAVE_TIMEOUT, 3 * step_s), abs=0.11)


def test_a_stop_waits_while_any_rank_makes_steps_but_not_for_ever(clock: Clock) -> None:
    it = ending(clock)
    it.take_status(0, status(8, 0.02))
    it.take_status(1, status(3, 0.5))
    it.note_stop()
    began = clock.now
    while clock.now - began < MAX_STEP_WAIT - 1:
        clock.now += 1.2
        it.note_step(1, int(clock.now))
        assert it.next_action() == "" or clock.now - began > MAX_STEP_WAIT
    assert first(clock, it, "abort", 3) < 3


def test_a_stop_waits_longer_before_the_first_step(clock: Clock) -> None:
    it = ending(clock)
    it.take_status(0, status(0, 0.0))
    it.note_stop()
    assert first(clock, it, "abort", 20) == pytest.approx(FIRST_STEP_WAIT, abs=0.11)


def test_a_stop_waits_for_ranks_that_are_starting(clock: Clock) -> None:
    it = ending(clock)
    clock.now += 1000
    assert not it.is_stop_overdue
    it.note_stop()
    clock.now += 0.9 * FIRST_STEP_WAIT
    assert not it.is_stop_overdue
    clock.now += 0.2 * FIRST_STEP_WAIT
    assert it.is_stop_overdue


def test_nothing_is_due_during_training(clock: Clock) -> None:
    it = ending(clock)
    it.take_status(0, status(5))
    clock.now += 1000
    assert it.next_action() == "" and not it.is_end_near


def test_a_rank_is_over_by_its_status_or_its_rows(clock: Clock) -> None:
    it = ending(clock)
    it.take_status(0, status(9, over=True, state="done"))
    assert it.next_action() == "" and it.awaited_ranks == {1}
    it.note_left(1, "done")
    assert it.next_action() == "over" and it.find_outcome() == ("done", [])


def test_losing_a_peer_after_a_stop_request_is_no_failure(clock: Clock) -> None:
    it = ending(clock)
    it.note_stop()
    it.note_error(1, lost(1))
    it.note_left(0, "stopped")
    it.note_left(1, "failed")
    assert it.find_outcome() == ("stopped", [])


def test_a_lost_peer_without_a_stop_and_an_own_error_after_one_are_failures(
    clock: Clock,
) -> None:
    it = ending(clock)
    it.note_error(1, lost(1))
    assert it.find_outcome()[0] == "failed"
    it = ending(clock)
    it.note_stop()
    it.note_error(0, lost(0))
    it.note_error(1, {**lost(1), "type": "ValueError", "text": "a bad example", "consequence": False})
    state, (error,) = it.find_outcome()
    assert (state, error["rank"]) == ("failed", 1)


def test_a_rank_ordered_to_leave_before_it_noticed_the_death_is_no_culprit(clock: Clock) -> None:
    """On a busy machine the order to leave may arrive before a connection closes."""
    it = ending(clock, 4)
    for rank in range(4):
        it.note_step(rank, 3)
    it.note_error(3, {**lost(3), "type": "EngineDied", "text": "killed", "consequence": False})
    it.note_error(0, lost(0))
    first(clock, it, "abort", 1)
    it.note_abort()
    for rank, state in enumerate(("failed", "stopped", "stopped")):
        it.note_left(rank, state)
    state, errors = it.find_outcome()
    error = RankError(errors)
    assert (state, error.rank, error.freed) == ("failed", 3, [0, 1, 2])
    assert str(error).startswith("rank 3, step 3, all_reduce: EngineDied: killed (ranks 0-2 were freed because of it)")


def test_a_rank_that_ended_without_a_final_report_has_failed(clock: Clock) -> None:
    it = ending(clock, 1)
    it.take_status(0, status(4, over=True))
    assert it.next_action() == "over" and it.find_outcome() == ("failed", [])


def test_ranks_are_freed_soon_after_an_error_and_at_once_after_a_death(clock: Clock) -> None:
    it = ending(clock)
    it.note_error(1, {**lost(1), "consequence": False, "text": "mine"})
    assert first(clock, it, "abort", 2) == pytest.approx(0.5, abs=0.11)
    it = ending(clock)
    it.note_error(1, {**lost(1), "type": "EngineDied"})
    clock.now += 0.01
    assert it.next_action() == "abort" and it.awaited_ranks == {0}


def test_ranks_ordered_to_leave_before_they_begin_get_time_once_they_begin(clock: Clock) -> None:
    it = ending(clock)
    it.note_stop()
    it.note_abort()
    clock.now += 8  # now they begin
    it.restart_waits()
    assert it.next_action() == ""
    assert first(clock, it, "give up", 20) == pytest.approx(LEAVE_TIMEOUT, abs=0.11)


def test_a_ranks_first_report_of_its_end_counts(clock: Clock) -> None:
    it = ending(clock)
    it.note_left(0, "done")
    it.take_status(0, {**status(3), "over": True})
    it.note_left(1, "done")
    assert it.find_outcome() == ("done", [])


def came(live: RunController, rank: int, step: int, t: float, name: str, detail: dict[str, Any]) -> None:
    """Delivers a rank's next mark."""
    row = columns_of("marks", [(rank, step, name, t, json.dumps(detail))])
    live.take_batch(RowBatch("g", "marks", rank, live.reorder_buffer.next_seq["marks", rank], row))


def test_a_second_nan_is_judged_by_the_watchers_at_that_time() -> None:
    watched = True
    live = RunController(Run({}, live=True), Any, Changes(Experiment(ranks=2), []), "g", lambda: watched)  # type: ignore[arg-type]
    came(live, 0, 0, 1.0, "state", {"state": "running"})
    came(live, 1, 4, 2.0, "nan", {"loss": "nan"})
    assert live.ending.unwatched_error is None and not live.ending.is_stop_requested, "somebody watches: it pauses"
    came(live, 0, 5, 3.0, "state", {"state": "running"})
    watched = False
    came(live, 0, 4, 2.1, "nan", {"loss": "nan"})  # a late row from before
    assert not live.ending.is_stop_requested
    came(live, 1, 9, 4.0, "nan", {"loss": "inf"})
    assert (
        live.ending.is_stop_requested
        and live.ending.unwatched_error is not None
        and live.ending.unwatched_error["step"] == 9
    )


def test_a_watching_thread_survives_errors_of_its_looks(caplog: pytest.LogCaptureFixture) -> None:
    over, looks, said = threading.Event(), [], []

    def look() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("cannot join thread before it is started")

    with caplog.at_level(logging.ERROR):
        it = SupervisedThread("steady", look, over, said.append).start()
        assert until(lambda: len(looks) > 4)
        over.set()
        assert it.join(60)
    assert [str(e) for e in said] == ["cannot join thread before it is started"] * 2
    (record,) = [r for r in caplog.records if r.name.endswith("supervised_thread")]
    assert record.exc_info, "the traceback is in the log, once"


def test_a_watching_thread_survives_errors_of_its_listener() -> None:
    over, looks = threading.Event(), []

    def look() -> None:
        looks.append(1)
        raise OSError("disk")

    def said(error: Exception) -> None:
        raise ValueError("nobody listens")

    it = SupervisedThread("steady", look, over, said).start()
    assert until(lambda: len(looks) > 2)
    over.set()
    assert it.join(60)


def test_an_evicted_rank_is_named_with_the_reason_although_its_end_is_noticed_late() -> None:
    """The report that ranks went on may arrive before the kernel notices the dead engine."""
    e = Experiment(ranks=3, on_death="end")
    cluster = SimpleNamespace(engines=[SimpleNamespace(host=host_name())] * 3, describe_death=lambda rank: None)
    live = RunController(Run({}, live=True), cluster, Changes(e, []), "g")  # type: ignore[arg-type]
    live.commands.follow_leader = lambda rank, gone: None  # type: ignore[method-assign]
    live.evictions.reasons[2], live.evictions.leaving = "as asked", {2}
    said = {"members": [0, 1], "gone": [2], "step": 5, "text": "ranks 0, 1 went on"}
    came(live, 0, 5, 1.0, "members", {**said, "settings": e.set("ranks", 2).plain()})
    live.note_death(2, {"type": "EngineDied", "step": 5, "op": "forward", "text": "its engine is gone"})
    assert live.notes[-1] == "rank 2 is lost at step 5, forward: was put out: as asked; its engine is gone"


def test_an_attaching_kernel_reports_the_step_of_a_lost_rank() -> None:
    """The record is the only source about that rank, because its engine does not answer."""
    recorded = synthetic.run("DDP", 3, 40, changes=(), eval_every=0)
    live = RunController(
        recorded,
        SimpleNamespace(engines=[SimpleNamespace(host=host_name())] * 3, describe_death=lambda rank: None),
        Changes(  # type: ignore[arg-type]
            Experiment(ranks=3, on_death="go on"), []
        ),
        "g",
    )
    live.replay_record()
    live.note_death(2, live.hang_monitor.describe_death(2, "(pid 5) is gone"))
    assert live.notes[-1] == "rank 2 is lost at step 40: its engine (pid 5) is gone"


def test_an_attaching_kernel_knows_changes_before_and_after_a_loss() -> None:
    e = Experiment(ranks=3, on_death="go on")
    change = {"path": "bucket_mb", "value": 0.5, "id": "change 1"}
    after = e.set("ranks", 2).set("bucket_mb", 0.5)
    said = {"members": [1, 2], "gone": [0], "step": 5, "text": "ranks 1, 2 went on", "settings": after.plain()}
    there: Any = SimpleNamespace(describe_death=lambda rank: None)
    lives = [RunController(Run({}, live=True), there, Changes(e, []), "g") for _ in range(2)]
    came(lives[0], 0, 3, 1.0, "change", change)
    came(lives[0], 1, 5, 2.0, "members", said)
    came(lives[0], 1, 7, 3.0, "change", {"path": "bucket_mb", "value": 0.25, "id": "change 2"})
    came(lives[0], 1, 3, 1.5, "change", {**change, "again": True})
    lives[1].run = lives[0].run
    lives[1].replay_record()
    for live in lives:
        assert live.changes.experiment == after.set("bucket_mb", 0.25)
        assert [(c.id, c.applied_at) for c in live.changes.history] == [("change 1", 3), ("change 2", 7)]
        assert live.members == (1, 2)
    assert [c.value for c in lives[0].run.changes] == [0.5, 0.25]


def test_ranks_are_replaced_although_the_report_of_training_was_lost_with_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's reports are on no disk, and the new first rank has not gone on yet when a kernel attaches."""
    e, asked = Experiment(ranks=3, on_death="replace"), []
    there: Any = SimpleNamespace(engines=[SimpleNamespace(host=host_name())] * 3, describe_death=lambda rank: rank == 0)
    before = RunController(Run({}, live=True), there, Changes(e, []), "g")
    said = {"members": [1, 2], "gone": [0], "step": 9, "text": "ranks 1, 2 went on"}
    before.evictions.can_replace = False
    came(before, 1, 9, 1.0, "members", {**said, "settings": e.set("ranks", 2).plain()})
    live = RunController(before.run, there, Changes(e, []), "g")
    live.replay_record()
    live.note_death(0, live.hang_monitor.describe_death(0, "(pid 5) is gone"))
    assert live.notes == ["ranks 1, 2 went on", "rank 0 is lost: its engine (pid 5) is gone"]
    monkeypatch.setattr(evictions, "find_start_obstacle", lambda cluster, count: "")
    monkeypatch.setattr(evictions, "resize_run", lambda live, ranks: asked.append((live.state, ranks)) or GRANTED)
    live.evictions.replace_lost()
    assert not until(lambda: asked, 0.3), "nobody can be asked yet"
    came(live, 1, 9, 1.1, "state", {"state": "running"})
    assert until(lambda: asked) and asked == [("running", 3)]


def test_ranks_lost_before_requests_are_possible_are_replaced_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two separate requests would each ask for one rank more than there are."""
    there, asked = SimpleNamespace(engines=[], describe_death=lambda rank: None), list[int]()
    live = RunController(Run({}, live=True), there, Changes(Experiment(ranks=4, on_death="replace"), []), "g")  # type: ignore[arg-type]
    monkeypatch.setattr(evictions, "find_start_obstacle", lambda cluster, count: "")
    monkeypatch.setattr(evictions, "resize_run", lambda live, ranks: asked.append(ranks) or GRANTED)
    live.members = (2, 3)
    for _ in range(2):
        live.evictions._begin_replacing(1)
    live.state = "running"
    assert until(lambda: asked) and asked == [4]
    assert until(lambda: not any(thread.name == "run replacing" for thread in threading.enumerate()))
    live.evictions._begin_replacing(1)
    assert until(lambda: asked[1:]) and asked == [4, 3]


@pytest.mark.parametrize("over", [
    lambda live: live.leave_run("the run is not followed here any more"), lambda live: live.request_stop(),
    lambda live: setattr(live, "state", "failed")], ids=["left", "stopping", "failed"])  # fmt: skip
def test_a_run_that_ended_before_it_trained_gets_no_replacements(
    over: Callable[[RunController], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: Any = SimpleNamespace(engines=[], describe_death=lambda rank: None)
    live = RunController(Run({}, live=True), there, Changes(Experiment(ranks=2, on_death="replace"), []), "g")
    monkeypatch.setattr(evictions, "resize_run", lambda live, ranks: pytest.fail("nobody is to come"))
    monkeypatch.setattr(evictions, "find_start_obstacle", lambda cluster, count: "")
    live.evictions.unreplaced = 1
    live.evictions.replace_lost()
    replacing = [thread for thread in threading.enumerate() if thread.name == "run replacing"]
    over(live)
    notes = list(live.notes)
    assert replacing and until(lambda: not any(thread.is_alive() for thread in replacing))
    assert live.notes == notes


def test_a_watch_returns_freed_memory_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    live = SimpleNamespace(ending=RunEnding(range(2)), ranks=range(2), over=threading.Event())
    looking, given = RunWatch(live), []  # type: ignore[arg-type]
    live.over.set()
    monkeypatch.setattr(free_memory, "release_free_memory", lambda: given.append(1))
    monkeypatch.setattr(looking, "request_status", lambda: None)
    monkeypatch.setattr(looking, "_check_engines", lambda: None)
    now = time.monotonic()
    for seconds, times in (
        (1, 0),
        (free_memory.READER_INTERVAL + 1, 1),
        (free_memory.READER_INTERVAL + 2, 1),
        (2 * free_memory.READER_INTERVAL + 3, 2),
    ):
        monkeypatch.setattr(free_memory.time, "monotonic", lambda seconds=seconds: now + seconds)
        looking._watch_once()
        assert len(given) == times


def died(rank: int) -> dict[str, Any]:
    return {"rank": rank, "step": 0, "op": "", "type": "EngineDied", "text": "killed"}


def test_a_rank_that_dies_before_it_has_joined_does_not_end_the_run(clock: Clock) -> None:
    it = ending(clock)
    it.survives_loss = lambda: True
    it.admit_ranks([2])
    it.note_error(2, died(2))
    clock.now += 1000
    assert it.next_action() == "" and it.awaited_ranks == {0, 1}
    for rank in (0, 1):
        it.note_left(rank, "done")
    assert it.next_action() == "over" and it.find_outcome() == ("done", [])


def test_a_rank_that_dies_before_its_join_is_reported_ends_the_run(clock: Clock) -> None:
    it = ending(clock)
    it.admit_ranks([2])
    it.note_error(2, died(2))
    it.note_joined([0, 1, 2])
    clock.now += 0.1
    assert it.next_action() == "abort" and [error["rank"] for error in it.find_outcome()[1]] == [2]


def test_a_rank_that_waits_to_join_leaves_after_the_last_step(clock: Clock) -> None:
    it = ending(clock)
    it.admit_ranks([2])
    for rank in (0, 1):
        it.note_left(rank, "done")
    assert it.next_action() == ""
    assert first(clock, it, "abort", 10) == pytest.approx(LEAVE_TIMEOUT, abs=0.11)
    it.note_abort()
    it.note_left(2, "failed")  # a session that is ordered to leave ends like this
    assert it.next_action() == "over" and it.find_outcome() == ("done", [])


def test_new_ranks_are_waited_for_if_the_old_ranks_only_left(clock: Clock) -> None:
    it = ending(clock)
    it.admit_ranks([2, 3])
    for rank in (0, 1):
        it.note_left(rank, "stopped")  # the new ranks train without them; the kernel does not know yet
    clock.now += LEAVE_TIMEOUT + 1
    assert it.next_action() == ""
