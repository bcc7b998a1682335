"""Tests on synthetic tables that the analysis finds the rank that delays the run, and never a victim."""

from __future__ import annotations

from itertools import combinations

import pytest

from workbench.cluster.observe.hang_diagnosis import FIRST_STEP_STALL, MIN_STALL, RankPlace, find_patience, find_stall

REDUCE = "all_reduce bucket 0"


def waits(step: int = 5, op: str = REDUCE, still: float = 12.0) -> RankPlace:
    return RankPlace(step, op, True, still, 0.5)


def computes(step: int = 5, op: str = "forward", still: float = 12.0) -> RankPlace:
    return RankPlace(step, op, False, still, 0.5)


def mute(step: int = 5, op: str = "forward", seconds: float = 12.0, waiting: bool = False) -> RankPlace:
    return RankPlace(step, op, waiting, seconds, seconds)


def text(*table: RankPlace, limit: float = 10.0) -> str:
    found = find_stall(dict(enumerate(table)), limit)
    return found.text if found else ""


def test_a_silent_rank_is_named_with_the_operation_the_others_wait_in() -> None:
    said = text(waits(), waits(), mute(), waits())
    assert said == "rank 2 has said nothing for 12 s (last seen in forward of step 5); 0, 1, 3 wait in " + REDUCE


@pytest.mark.parametrize(
    ("op", "words"),
    [("forward", "forward of step 5"), ("data iterator", "its data iterator of step 5"), ("evaluate", "evaluate of"),
     ("step", "its strategy's own code"), ("", "an unknown operation")],
)  # fmt: skip
def test_a_rank_in_its_own_code_is_named_while_the_others_wait(op: str, words: str) -> None:
    said = text(waits(), computes(op=op), waits())
    assert said.startswith("rank 1 has been in ") and words in said and said.endswith("0, 2 wait in " + REDUCE)


@pytest.mark.parametrize("odd", [c for n in (1, 2) for c in combinations(range(4), n)])
def test_the_named_ranks_are_never_victims(odd: tuple[int, ...]) -> None:
    for culprit in (computes(), mute(), mute(op=REDUCE, waiting=True)):
        found = find_stall({r: culprit if r in odd else waits(still=11.0 + r) for r in range(4)}, 10.0)
        assert found is not None and found.stalled_ranks == odd


def test_a_rank_frozen_in_a_collective_is_named_although_it_seems_to_wait() -> None:
    found = find_stall({0: waits(), 1: mute(op=REDUCE, waiting=True), 2: waits()}, 10.0)
    assert found is not None and found.stalled_ranks == (1,)


def own(step: int = 5, line: int = 8) -> RankPlace:
    return RankPlace(step, f"all_reduce at train.py:{line}", True, 12.0, 0.5, own=True)


def test_a_rank_that_skipped_a_collective_of_the_script_is_named_and_the_line() -> None:
    found = find_stall({0: own(), 1: waits(op="backward")}, 10.0)
    assert found is not None and found.stalled_ranks == (1,)
    assert found.text == ("rank 1 went past all_reduce at train.py:8 of step 5, in which rank 0 waits, and waits in "
                          "backward of step 5; no rank has moved for 12 s")  # fmt: skip
    found = find_stall({0: own(), 1: waits(step=6), 2: own()}, 10.0)
    assert found is not None and found.stalled_ranks == (1,) and "in which ranks 0, 2 wait" in found.text


def test_a_rank_that_alone_calls_a_collective_is_named() -> None:
    found = find_stall({0: waits(op="backward"), 1: waits(op="backward"), 2: own()}, 10.0)
    assert found is not None and found.stalled_ranks == (2,)
    assert "rank 2 waits in all_reduce at train.py:8" in found.text
    found = find_stall({0: own(step=7), 1: waits(step=6)}, 10.0)
    assert found is not None and found.stalled_ranks == (0, 1), "who is behind skipped nothing"
    found = find_stall({0: own(), 1: own(line=9), 2: waits()}, 10.0)
    assert found is not None and "went past" not in found.text


def test_moving_ranks_are_not_reported() -> None:
    assert text(waits(still=0.1), computes(still=0.2), waits(still=0.1)) == ""
    assert text(waits(still=60.0), computes(still=0.2), waits(still=60.0)) == "", "it waits for one that computes"
    assert text(waits(still=9.9), computes(still=9.9)) == "" != text(waits(still=10.0), computes(still=10.0))
    assert find_stall({}, 10.0) is None and text(waits(still=60.0)) == "", "one rank alone waits for nobody"


def test_without_lockstep_the_stopped_rank_is_named_and_the_others_go_on() -> None:
    moving = computes(still=0.1)
    assert text(moving, moving, mute(step=3), moving).endswith("; 0, 1, 3 go on")
    assert text(waits(op="a meeting"), waits(op="a meeting"), mute(step=3)).endswith("; 0, 1 wait in a meeting")
    assert text(waits(still=0.2), moving, mute()).endswith("; 0, 1 go on"), "it waits as one does who goes on"
    assert text(waits(op="recv params from 2"), moving, mute()).endswith("; 0 waits in recv params from 2, 1 goes on")


def test_if_all_wait_the_rank_in_another_operation_is_named() -> None:
    found = find_stall({0: waits(6), 1: waits(6), 2: waits(5, "broadcast norms"), 3: waits(6)}, 10.0)
    assert found is not None and found.stalled_ranks == (2,)
    assert found.text == (
        "no rank has moved for 12 s: rank 2 waits in broadcast norms of step 5, ranks 0, 1, 3 wait in "
        "all_reduce bucket 0 of step 6"
    )


def test_two_ranks_that_wait_in_different_operations_are_both_named() -> None:
    found = find_stall({0: waits(6), 1: waits(5)}, 10.0)
    assert found is not None and found.stalled_ranks == (0, 1)
    assert found.text.index("rank 1 waits") < found.text.index("rank 0 waits"), "the one behind comes first"


def test_all_ranks_that_wait_in_one_operation_are_reported_together() -> None:
    found = find_stall({r: waits(still=12.0 + r) for r in range(3)}, 10.0)
    assert found is not None and found.text == "all ranks have waited in all_reduce bucket 0 of step 5 for 12 s"


def test_several_stopped_ranks_are_reported_by_place() -> None:
    said = text(computes(), computes(), computes(op="data iterator"), mute())
    assert said == (
        "rank 3 has said nothing for 12 s (last seen in forward of step 5); ranks 0, 1 have been in forward of step 5 "
        "for 12 s; rank 2 has been in its data iterator of step 5 for 12 s"
    )


def test_long_steps_are_not_reported() -> None:
    assert find_patience(None) == FIRST_STEP_STALL and find_patience(0.05) == MIN_STALL == find_patience(1.0)
    assert find_patience(60.0) > 2 * 60.0
    assert text(waits(still=100.0), computes(still=100.0), limit=find_patience(60.0)) == ""


def test_a_phase_that_took_long_before_is_slow_not_hanging() -> None:
    slow = computes()._replace(limit_factor=5.0)
    assert text(waits(), slow, waits()) == "" != text(waits(), slow._replace(stalled_seconds=50.0), waits())
    frozen = mute()._replace(limit_factor=2.0)
    assert text(waits(), frozen) == "" != text(waits(), frozen._replace(silent_seconds=20.0))


@pytest.mark.parametrize(("table", "sure"), [
    ((waits(), mute(), waits(), waits()), True),
    ((waits(), computes(), waits()), True),
    ((waits(), computes()), True),
    ((computes(still=0.2), mute(step=3), computes(still=0.4)), True),
    ((waits(), computes(), computes(still=9.0)), False),  # the third may be next
    ((computes(), computes(), waits()), False),  # most ranks run their own code: a long step
    ((computes(), computes()), False),
    ((mute(), mute(), mute(), waits()), False),  # this kernel may receive no messages
    ((waits(6), waits(6), waits(5, "broadcast norms")), False),  # no rank runs its own code
    ((waits(), waits(), waits()), False),
])  # fmt: skip
def test_a_verdict_is_sure_only_if_few_ranks_hang_and_no_other_may(table: tuple[RankPlace, ...], sure: bool) -> None:
    found = find_stall(dict(enumerate(table)), 10.0)
    assert found is not None and found.is_certain is sure


def test_the_systems_state_of_a_process_is_reported() -> None:
    said = text(waits(), mute()._replace(process="its process (pid 7) is stopped, as by SIGSTOP"))
    assert "12 s (its process (pid 7) is stopped, as by SIGSTOP; last seen in forward of step 5); 0 w" in said
