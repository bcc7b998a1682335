"""How a run ends if ranks die while new ranks join, or if a stop comes before the remaining ranks have agreed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.test_ending import Clock, first, lost, status
from workbench.cluster.run.rank_errors import RankError
from workbench.cluster.run.run_ending import LEAVE_TIMEOUT, REGROUP_TIMEOUT, RunEnding


def ending(ranks: int, outlives: bool = True) -> RunEnding:
    made = RunEnding(range(ranks), Clock())
    made.survives_loss = lambda: outlives
    for rank in range(ranks):
        made.take_status(rank, status(5))
    return made


def killed(rank: int) -> dict[str, Any]:
    return {"rank": rank, "step": 5, "op": "", "type": "EngineDied", "text": "its engine ended with signal SIGKILL"}


def kill(it: RunEnding, *ranks: int) -> None:
    for rank in ranks:
        it.note_error(rank, killed(rank))


def test_new_ranks_that_nobody_can_invite_are_freed_after_seconds() -> None:
    it = ending(2)
    it.admit_ranks([2, 3])
    for rank in (2, 3):
        it.take_status(rank, status(0, state="waiting"))
    assert it.next_action() == ""
    kill(it, 0, 1)
    assert first(it.clock, it, "abort", REGROUP_TIMEOUT / 2) == pytest.approx(LEAVE_TIMEOUT, abs=0.11)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["starting", "running"])
def test_new_ranks_that_were_invited_get_the_time_to_agree(said: str) -> None:
    it = ending(2)
    it.admit_ranks([2, 3])
    it.take_status(2, status(0, state="waiting"))
    it.take_status(3, status(0, state=said))
    kill(it, 0, 1)
    assert first(it.clock, it, "abort", 2 * REGROUP_TIMEOUT) == pytest.approx(REGROUP_TIMEOUT, abs=0.11)  # type: ignore[arg-type]


def test_the_wait_for_an_invitation_begins_anew_once_an_old_rank_is_there() -> None:
    it, clock = ending(2), Clock()
    it.clock = clock
    it.admit_ranks([2])
    it.take_status(2, status(0, state="waiting"))
    kill(it, 0, 1)
    assert it.next_action() == ""
    it.note_joined([0, 2])
    it.note_removed([0, 1], 5)
    clock.now += 2 * LEAVE_TIMEOUT
    assert it.next_action() == "", "rank 2 trains now"


@pytest.mark.parametrize(("outlives", "state"), [(True, "stopped"), (False, "failed")])
def test_a_stop_before_the_others_have_agreed_ends_a_run_that_would_have_gone_on_as_stopped(
    outlives: bool, state: str
) -> None:
    it = ending(3, outlives)
    kill(it, 2)
    it.note_stop()
    for rank in (0, 1):
        it.note_left(rank, "stopped")
    assert it.next_action() == "over"
    assert it.find_outcome() == (state, [] if outlives else [it.errors[2]])


def test_a_stop_after_all_trained_ranks_died_does_not_hide_that() -> None:
    it = ending(2)
    it.admit_ranks([2])
    kill(it, 0, 1)
    it.note_stop()
    it.note_left(2, "stopped")
    state, errors = it.find_outcome()
    assert state == "failed" and {error["rank"] for error in errors} == {0, 1}


@pytest.mark.parametrize("heard_first", ["end", "death"])
def test_a_rank_that_dies_after_its_last_step_fails_no_run(heard_first: str) -> None:
    it = ending(2)
    if heard_first == "end":
        it.note_left(0, "done")
        kill(it, 0)
    else:  # the record of its end is read from its disk later
        kill(it, 0)
        it.note_left(0, "done")
    it.clock.now += 2 * REGROUP_TIMEOUT  # type: ignore[attr-defined]
    assert it.next_action() == "" and it.dead_ranks == {0}
    it.note_left(1, "done")
    assert (it.next_action(), it.find_outcome()) == ("over", ("done", []))


@pytest.mark.parametrize("heard_first", ["end", "death"])
def test_a_death_after_the_last_step_is_the_cause_if_another_rank_loses_its_peer(heard_first: str) -> None:
    it = ending(3, outlives=False)
    for event in (lambda: it.note_left(0, "done"), lambda: kill(it, 0))[:: 1 if heard_first == "end" else -1]:
        event()
    it.note_error(1, lost(1))
    for rank, state in ((1, "failed"), (2, "done")):
        it.note_left(rank, state)
    state, errors = it.find_outcome()
    error = RankError(errors)
    assert (state, error.type, error.rank, error.freed) == ("failed", "EngineDied", 0, [1])


def test_a_death_after_the_last_step_is_not_the_cause_of_another_ranks_own_error() -> None:
    it = ending(2, outlives=False)
    it.note_left(0, "done")
    kill(it, 0)
    it.note_error(1, {"rank": 1, "step": 5, "op": "", "type": "OSError", "text": "No space left on device"})
    it.note_left(1, "failed")
    assert [error["rank"] for error in it.find_outcome()[1]] == [1]
