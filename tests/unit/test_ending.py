"""How a run ends: how long is waited for whom, and what it then was. In a time of its own, without ranks."""

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
from workbench.cluster.processes.place import host
from workbench.cluster.processes.steady import Steady
from workbench.cluster.run import evicting
from workbench.cluster.run.changes import Changes
from workbench.cluster.run.ending import FIRST, LEAVE, MOST, Ending
from workbench.cluster.run.errors import RankError
from workbench.cluster.run.live import Live
from workbench.cluster.run.watch import Watch
from workbench.cluster.transport.wire import Batch
from workbench.experiment import Experiment
from workbench.record import tidy
from workbench.record.timeline import columns_of
from workbench.run import Run

GRANTED: Any = SimpleNamespace(wait=lambda seconds: None, coming=())  # a request for ranks that they have met


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def status(step: int, step_s: float = 0.1, **rest: Any) -> dict[str, Any]:
    return {"state": "running", "step": step, "step_s": step_s, "over": False, **rest}


def ending(clock: Clock, ranks: int = 2) -> Ending:
    return Ending(range(ranks), clock)


def lost(rank: int) -> dict[str, Any]:
    text = "Connection closed by peer [127.0.0.1]:1"
    return {"rank": rank, "step": 3, "op": "all_reduce", "type": "RuntimeError", "text": text, "consequence": True}


def first(clock: Clock, it: Ending, due: str, within: float) -> float:
    """Seconds until `due` is due."""
    began = clock.now
    while it.due() != due:
        clock.now += 0.05
        assert clock.now - began < within, f"{due} not due within {within} s"
    return clock.now - began


@pytest.mark.parametrize(("step_s", "waits"), [(0.01, 1.0), (2.0, 6.0)])
def test_a_stop_waits_for_a_boundary_in_proportion_to_the_steps(clock: Clock, step_s: float, waits: float) -> None:
    it = ending(clock)
    it.heard(0, status(5, step_s))
    it.stop()
    assert first(clock, it, "abort", 10) == pytest.approx(waits, abs=0.11)
    it.abort()
    assert first(clock, it, "give up", 20) == pytest.approx(max(LEAVE, 3 * step_s), abs=0.11)


def test_as_long_as_any_rank_makes_steps_all_are_waited_for_but_not_for_ever(clock: Clock) -> None:
    it = ending(clock)
    it.heard(0, status(8, 0.02))
    it.heard(1, status(3, 0.5))
    it.stop()
    began = clock.now
    while clock.now - began < MOST - 1:
        clock.now += 1.2
        it.at(1, int(clock.now))
        assert it.due() == "" or clock.now - began > MOST
    assert first(clock, it, "abort", 3) < 3


def test_before_the_first_step_there_is_more_patience(clock: Clock) -> None:
    it = ending(clock)
    it.heard(0, status(0, 0.0))
    it.stop()
    assert first(clock, it, "abort", 20) == pytest.approx(FIRST, abs=0.11)


def test_ranks_that_are_beginning_are_given_time_to_when_a_stop_is_asked(clock: Clock) -> None:
    it = ending(clock)
    clock.now += 1000
    assert not it.unwanted
    it.stop()
    clock.now += 0.9 * FIRST
    assert not it.unwanted
    clock.now += 0.2 * FIRST
    assert it.unwanted


def test_nothing_is_due_while_it_trains(clock: Clock) -> None:
    it = ending(clock)
    it.heard(0, status(5))
    clock.now += 1000
    assert it.due() == "" and not it.near


def test_a_rank_is_over_when_its_line_or_its_rows_say_so(clock: Clock) -> None:
    it = ending(clock)
    it.heard(0, status(9, over=True, state="done"))
    assert it.due() == "" and it.inside == {1}
    it.gone(1, "done")
    assert it.due() == "over" and it.outcome() == ("done", [])


def test_losing_a_peer_after_a_stop_was_asked_is_no_failure(clock: Clock) -> None:
    it = ending(clock)
    it.stop()
    it.failed(1, lost(1))
    it.gone(0, "stopped")
    it.gone(1, "failed")
    assert it.outcome() == ("stopped", [])


def test_losing_a_peer_is_a_failure_where_nobody_asked_and_so_is_an_error_of_ones_own_after_a_stop(
    clock: Clock,
) -> None:
    it = ending(clock)
    it.failed(1, lost(1))
    assert it.outcome()[0] == "failed"
    it = ending(clock)
    it.stop()
    it.failed(0, lost(0))
    it.failed(1, {**lost(1), "type": "ValueError", "text": "a bad example", "consequence": False})
    state, (error,) = it.outcome()
    assert (state, error["rank"]) == ("failed", 1)


def test_a_rank_that_was_told_to_leave_before_it_missed_the_dead_one_was_freed_too(clock: Clock) -> None:
    """On a busy machine the word to leave may come before the closing of a wire."""
    it = ending(clock, 4)
    for rank in range(4):
        it.at(rank, 3)
    it.failed(3, {**lost(3), "type": "EngineDied", "text": "killed", "consequence": False})
    it.failed(0, lost(0))
    first(clock, it, "abort", 1)
    it.abort()
    for rank, state in enumerate(("failed", "stopped", "stopped")):
        it.gone(rank, state)
    state, errors = it.outcome()
    error = RankError(errors)
    assert (state, error.rank, error.freed) == ("failed", 3, [0, 1, 2])
    assert str(error).startswith("rank 3, step 3, all_reduce: EngineDied: killed (ranks 0-2 were freed because of it)")


def test_a_rank_that_ended_without_a_final_word_has_failed(clock: Clock) -> None:
    it = ending(clock, 1)
    it.heard(0, status(4, over=True))
    assert it.due() == "over" and it.outcome() == ("failed", [])


def test_ranks_are_freed_soon_after_an_error_and_at_once_after_a_death(clock: Clock) -> None:
    it = ending(clock)
    it.failed(1, {**lost(1), "consequence": False, "text": "mine"})
    assert first(clock, it, "abort", 2) == pytest.approx(0.5, abs=0.11)
    it = ending(clock)
    it.failed(1, {**lost(1), "type": "EngineDied"})
    clock.now += 0.01
    assert it.due() == "abort" and it.inside == {0}


def test_ranks_that_were_told_to_leave_before_they_had_begun_get_their_time_once_they_have(clock: Clock) -> None:
    it = ending(clock)
    it.stop()
    it.abort()
    clock.now += 8  # they begin
    it.begun()
    assert it.due() == ""
    assert first(clock, it, "give up", 20) == pytest.approx(LEAVE, abs=0.11)


def test_what_a_rank_says_first_of_its_end_stands(clock: Clock) -> None:
    it = ending(clock)
    it.gone(0, "done")
    it.heard(0, {**status(3), "over": True})
    it.gone(1, "done")
    assert it.outcome() == ("done", [])


def came(live: Live, rank: int, step: int, t: float, name: str, detail: dict[str, Any]) -> None:
    """A rank's next mark has come."""
    row = columns_of("marks", [(rank, step, name, t, json.dumps(detail))])
    live.take(Batch("g", "marks", rank, live.gaps.next["marks", rank], row))


def test_a_run_that_went_on_after_a_nan_is_judged_anew_by_who_watches_then() -> None:
    watched = True
    live = Live(Run({}, live=True), Any, Changes(Experiment(ranks=2), []), "g", lambda: watched)  # type: ignore[arg-type]
    came(live, 0, 0, 1.0, "state", {"state": "running"})
    came(live, 1, 4, 2.0, "nan", {"loss": "nan"})
    assert live.ending.unwatched is None and not live.ending.asked, "somebody watches: it pauses"
    came(live, 0, 5, 3.0, "state", {"state": "running"})
    watched = False
    came(live, 0, 4, 2.1, "nan", {"loss": "nan"})  # a row that comes late, of before
    assert not live.ending.asked
    came(live, 1, 9, 4.0, "nan", {"loss": "inf"})
    assert live.ending.asked and live.ending.unwatched is not None and live.ending.unwatched["step"] == 9


def test_a_thread_that_others_wait_for_survives_what_its_looks_raise(caplog: pytest.LogCaptureFixture) -> None:
    over, looks, said = threading.Event(), [], []

    def look() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("cannot join thread before it is started")

    with caplog.at_level(logging.ERROR):
        it = Steady("steady", look, over, said.append).start()
        assert until(lambda: len(looks) > 4)
        over.set()
        assert it.join(60)
    assert [str(e) for e in said] == ["cannot join thread before it is started"] * 2
    (record,) = [r for r in caplog.records if r.name.endswith("steady")]
    assert record.exc_info, "the traceback is in the log, once"


def test_an_error_of_the_one_who_is_told_does_not_end_it_either() -> None:
    over, looks = threading.Event(), []

    def look() -> None:
        looks.append(1)
        raise OSError("disk")

    def said(error: Exception) -> None:
        raise ValueError("nobody listens")

    it = Steady("steady", look, over, said).start()
    assert until(lambda: len(looks) > 2)
    over.set()
    assert it.join(60)


def test_a_rank_put_out_by_hand_is_named_with_the_reason_though_the_others_were_quicker_than_its_end() -> None:
    """Their word that they went on, after which nobody is about to leave, may come before its engine is seen gone."""
    e = Experiment(ranks=3, on_death="end")
    cluster = SimpleNamespace(engines=[SimpleNamespace(host=host())] * 3, death=lambda rank: None)
    live = Live(Run({}, live=True), cluster, Changes(e, []), "g")  # type: ignore[arg-type]
    live.orders.hears = lambda rank, gone: None  # type: ignore[method-assign]
    live.evicting.reasons[2], live.evicting.leaving = "as asked", {2}
    said = {"members": [0, 1], "gone": [2], "step": 5, "text": "ranks 0, 1 went on"}
    came(live, 0, 5, 1.0, "members", {**said, "settings": e.set("ranks", 2).plain()})
    live.died(2, {"type": "EngineDied", "step": 5, "op": "forward", "text": "its engine is gone"})
    assert live.notes[-1] == "rank 2 is lost at step 5, forward: was put out: as asked; its engine is gone"


def test_a_kernel_that_attaches_says_where_one_was_who_was_lost_meanwhile() -> None:
    """The record is all that it has of that rank, whose engine answers nobody."""
    recorded = synthetic.run("DDP", 3, 40, changes=(), eval_every=0)
    live = Live(recorded, SimpleNamespace(engines=[SimpleNamespace(host=host())] * 3, death=lambda rank: None), Changes(  # type: ignore[arg-type]
        Experiment(ranks=3, on_death="go on"), []), "g")  # fmt: skip
    live.replay()
    live.died(2, live.attention.death(2, "(pid 5) is gone"))
    assert live.notes[-1] == "rank 2 is lost at step 40: its engine (pid 5) is gone"


def test_a_kernel_that_attaches_knows_what_was_changed_before_and_after_a_rank_was_lost() -> None:
    e = Experiment(ranks=3, on_death="go on")
    change = {"path": "bucket_mb", "value": 0.5, "id": "change 1"}
    after = e.set("ranks", 2).set("bucket_mb", 0.5)
    said = {"members": [1, 2], "gone": [0], "step": 5, "text": "ranks 1, 2 went on", "settings": after.plain()}
    there: Any = SimpleNamespace(death=lambda rank: None)
    lives = [Live(Run({}, live=True), there, Changes(e, []), "g") for _ in range(2)]
    came(lives[0], 0, 3, 1.0, "change", change)
    came(lives[0], 1, 5, 2.0, "members", said)
    came(lives[0], 1, 7, 3.0, "change", {"path": "bucket_mb", "value": 0.25, "id": "change 2"})
    came(lives[0], 1, 3, 1.5, "change", {**change, "again": True})
    lives[1].run = lives[0].run
    lives[1].replay()
    for live in lives:
        assert live.changes.experiment == after.set("bucket_mb", 0.25)
        assert [(c.id, c.applied_at) for c in live.changes.listed] == [("change 1", 3), ("change 2", 7)]
        assert live.members == (1, 2)
    assert [c.value for c in lives[0].run.changes] == [0.5, 0.25]


def test_others_come_though_the_word_that_the_run_trains_was_lost_with_the_rank_that_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that rank 0 told is on a disk, and who says it now has not gone on yet when a kernel attaches."""
    e, asked = Experiment(ranks=3, on_death="replace"), []
    there: Any = SimpleNamespace(engines=[SimpleNamespace(host=host())] * 3, death=lambda rank: rank == 0)
    before = Live(Run({}, live=True), there, Changes(e, []), "g")
    said = {"members": [1, 2], "gone": [0], "step": 9, "text": "ranks 1, 2 went on"}
    before.evicting.acts = False
    came(before, 1, 9, 1.0, "members", {**said, "settings": e.set("ranks", 2).plain()})
    live = Live(before.run, there, Changes(e, []), "g")
    live.replay()
    live.died(0, live.attention.death(0, "(pid 5) is gone"))
    assert live.notes == ["ranks 1, 2 went on", "rank 0 is lost: its engine (pid 5) is gone"]
    monkeypatch.setattr(evicting, "cannot_start", lambda cluster, count: "")
    monkeypatch.setattr(evicting, "resize", lambda live, ranks: asked.append((live.state, ranks)) or GRANTED)
    live.evicting.attached()
    assert not until(lambda: asked, 0.3), "nobody can be asked yet"
    came(live, 1, 9, 1.1, "state", {"state": "running"})
    assert until(lambda: asked) and asked == [("running", 3)]


def test_those_who_are_lost_while_nobody_can_be_asked_yet_are_replaced_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two who ask side by side would each ask for one more than there are."""
    there, asked = SimpleNamespace(engines=[], death=lambda rank: None), list[int]()
    live = Live(Run({}, live=True), there, Changes(Experiment(ranks=4, on_death="replace"), []), "g")  # type: ignore[arg-type]
    monkeypatch.setattr(evicting, "cannot_start", lambda cluster, count: "")
    monkeypatch.setattr(evicting, "resize", lambda live, ranks: asked.append(ranks) or GRANTED)
    live.members = (2, 3)
    for _ in range(2):
        live.evicting._begin_replacing(1)
    live.state = "running"
    assert until(lambda: asked) and asked == [4]
    assert until(lambda: not any(thread.name == "run replacing" for thread in threading.enumerate()))
    live.evicting._begin_replacing(1)
    assert until(lambda: asked[1:]) and asked == [4, 3]


@pytest.mark.parametrize("over", [
    lambda live: live.leave("the run is not followed here any more"), lambda live: live.come_to_end(),
    lambda live: setattr(live, "state", "failed")], ids=["left", "stopping", "failed"])  # fmt: skip
def test_nobody_comes_to_a_run_that_is_over_before_anybody_said_that_it_trains(
    over: Callable[[Live], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: Any = SimpleNamespace(engines=[], death=lambda rank: None)
    live = Live(Run({}, live=True), there, Changes(Experiment(ranks=2, on_death="replace"), []), "g")
    monkeypatch.setattr(evicting, "resize", lambda live, ranks: pytest.fail("nobody is to come"))
    monkeypatch.setattr(evicting, "cannot_start", lambda cluster, count: "")
    live.evicting.lacking = 1
    live.evicting.attached()
    replacing = [thread for thread in threading.enumerate() if thread.name == "run replacing"]
    over(live)
    notes = list(live.notes)
    assert replacing and until(lambda: not any(thread.is_alive() for thread in replacing))
    assert live.notes == notes


def test_a_watch_gives_back_now_and_then_what_views_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    live = SimpleNamespace(ending=Ending(range(2)), ranks=range(2), over=threading.Event())
    looking, given = Watch(live), []  # type: ignore[arg-type]
    live.over.set()
    monkeypatch.setattr(tidy, "give_back", lambda: given.append(1))
    monkeypatch.setattr(looking, "ask", lambda: None)
    monkeypatch.setattr(looking, "_look", lambda: None)
    now = time.monotonic()
    for seconds, times in ((1, 0), (tidy.OFTEN + 1, 1), (tidy.OFTEN + 2, 1), (2 * tidy.OFTEN + 3, 2)):
        monkeypatch.setattr(tidy.time, "monotonic", lambda seconds=seconds: now + seconds)
        looking._turn()
        assert len(given) == times


def died(rank: int) -> dict[str, Any]:
    return {"rank": rank, "step": 0, "op": "", "type": "EngineDied", "text": "killed"}


def test_a_rank_that_dies_before_it_has_joined_does_not_end_the_run(clock: Clock) -> None:
    it = ending(clock)
    it.outlives = lambda: True
    it.admit([2])
    it.failed(2, died(2))
    clock.now += 1000
    assert it.due() == "" and it.inside == {0, 1}
    for rank in (0, 1):
        it.gone(rank, "done")
    assert it.due() == "over" and it.outcome() == ("done", [])


def test_a_rank_that_dies_before_the_kernel_hears_that_it_has_joined_ends_the_run(clock: Clock) -> None:
    it = ending(clock)
    it.admit([2])
    it.failed(2, died(2))
    it.joined([0, 1, 2])
    clock.now += 0.1
    assert it.due() == "abort" and [error["rank"] for error in it.outcome()[1]] == [2]


def test_a_rank_that_waits_to_join_leaves_after_the_last_step(clock: Clock) -> None:
    it = ending(clock)
    it.admit([2])
    for rank in (0, 1):
        it.gone(rank, "done")
    assert it.due() == ""
    assert first(clock, it, "abort", 10) == pytest.approx(LEAVE, abs=0.11)
    it.abort()
    it.gone(2, "failed")  # so ends a session that is told to leave
    assert it.due() == "over" and it.outcome() == ("done", [])


def test_new_ranks_are_waited_for_if_the_old_ranks_only_left(clock: Clock) -> None:
    it = ending(clock)
    it.admit([2, 3])
    for rank in (0, 1):
        it.gone(rank, "stopped")  # the new ranks train without them; the kernel has not heard of it yet
    clock.now += LEAVE + 1
    assert it.due() == ""
