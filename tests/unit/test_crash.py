"""Tests a fault that ends a rank, on real ranks on threads."""

from __future__ import annotations

import json
import time

import pytest

from tests.ranks import ended, experiment, live
from workbench.engine.rank import crashing
from workbench.engine.rank import session as session_module
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Crash, Fabric, Slow, load
from workbench.fabric.algorithms import Ring
from workbench.settings import Change, KnobError, to_plain
from workbench.strategies import DDP, AsyncServer, LocalSGD


def crash(at: int, rank: int) -> Change:
    """Returns a Crash of `rank` before step `at`."""
    return Change(at, "fabric.faults", [to_plain(Crash(rank=rank))])


def crashed(e: Experiment, *changes: Change) -> tuple[list[Session], list[dict]]:
    """Runs `e` on threads to its end. Returns (sessions by rank, the record's details about members)."""
    sessions = live(e, changes)
    ended(sessions, 60)
    return sessions, [json.loads(m[3]) for s in sessions for m in s.record.noted("members")]


def test_only_a_new_crash_ends_a_rank() -> None:
    faults = (Crash(rank=1), Slow(rank=2))
    assert load.crashed((), faults, 4) == {1} and not load.crashed(faults, faults, 4)


def test_a_server_may_crash() -> None:
    assert not load.idle(Fabric(faults=(Crash(rank=0),)), servers=[0])
    with pytest.raises(KnobError, match="there are ranks 0 to 1"):
        experiment(2, fabric=Fabric(faults=(Crash(rank=2),)))


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 2], ids="rank {}".format)
def test_the_other_ranks_go_on_from_the_step_of_the_crash(victim: int) -> None:
    sessions, (mark,) = crashed(experiment(3, 12, strategy=DDP(), on_death="go on"), crash(5, victim))
    left = [s for s in sessions if s.member != victim]
    assert mark["members"] == [s.member for s in left] and mark["gone"] == [victim] and mark["step"] == 5
    assert [s.phase for s in left] == ["done"] * 2 and {s.rank.step for s in left} == {12}
    assert sessions[victim].rank.step == 5 and sessions[victim].record.noted("fault")[0][0] == 5
    assert not left[0].experiment.fabric.faults, "it is no fault of those who are left"


@pytest.mark.ranks
def test_a_rank_that_crashes_at_once_makes_no_step() -> None:
    e = experiment(3, 8, strategy=LocalSGD(every=4), on_death="go on", fabric=Fabric(faults=(Crash(rank=1),)))
    sessions, (mark,) = crashed(e)
    assert mark["gone"] == [1] and not [row for row in sessions[1].record if row[1] == "step"]
    assert [s.phase for s in sessions] == ["done", "failed", "done"]


@pytest.mark.ranks
def test_a_server_crashes_at_the_meeting_of_the_change() -> None:
    sessions, (mark,) = crashed(experiment(3, 30, strategy=AsyncServer(), on_death="go on"), crash(5, 0))
    assert mark["gone"] == [0] and [s.phase for s in sessions] == ["failed", "done", "done"]


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 2], ids="rank {}".format)
def test_no_rank_waits_for_a_dead_rank_without_an_open_mailbox(victim: int) -> None:
    """The first messages are those of the sum after step 7, to a rank that is dead by then."""
    fabric = Fabric(algorithm=Ring())
    sessions, marks = crashed(experiment(3, 10, strategy=LocalSGD(every=8), on_death="go on", fabric=fabric),
                              crash(5, victim))  # fmt: skip
    assert [mark["gone"] for mark in marks] == [[victim]]
    assert [s.phase for s in sessions if s.member != victim] == ["done"] * 2


@pytest.mark.ranks
def test_a_rank_crashes_after_all_ranks_have_made_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the ranks left might make the change again, and lose the rank that has the number by then."""
    past, crash_on = dict[int, float](), crashing.crash_rank

    def late(session: Session, mine: bool) -> None:
        time.sleep(0.3 * (session.member == 0))
        past[session.member] = time.monotonic()
        crash_on(session, mine)

    monkeypatch.setattr(session_module, "crash_rank", late)
    sessions, (mark,) = crashed(experiment(3, 8, strategy=DDP(), on_death="go on"), crash(5, 1))
    ends = next(t for step, name, t, _ in sessions[1].record.marks if name == "end")
    told = next(t for step, name, t, _ in sessions[1].record.marks if name == "fault")
    assert ends - told > 0.2 and past.keys() == {0, 1, 2} and mark["gone"] == [1]


@pytest.mark.ranks
def test_by_default_a_crash_ends_the_run() -> None:
    sessions, marks = crashed(experiment(3, 12, strategy=DDP()), crash(5, 1))
    assert not marks and [s.phase for s in sessions] == ["failed"] * 3
