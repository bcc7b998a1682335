"""Tests the evaluation of log lines from killed and surviving processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bench.recovering import killing, table
from tests.bench.recovering.killing import Row, measured, whole


def made(t: float, step: int, size: int, *pids: int) -> list[Row]:
    return [Row(t + pid / 1000, "made", step, size, pid) for pid in pids]


BEFORE = [*made(1.0, 41, 4, 1, 2, 3, 4), *made(2.0, 42, 4, 1, 2, 3, 4)]


def test_a_group_that_goes_on_and_a_replacement_are_measured() -> None:
    found = [*BEFORE, Row(2.6, "failed", 42, 4, 1), *made(4.0, 43, 3, 1, 2, 3), *made(9.0, 80, 4, 1, 2, 3, 7)]
    got = measured(found, 2.5, victim=4)
    assert got["noticed"] == 2.6 - 2.5 and got["again"] == 0
    assert got["on"] == 4.003 - 2.5 and got["full"] == 9.007 - 2.5


def test_a_full_restart_from_a_checkpoint_is_measured() -> None:
    got = measured([*BEFORE, *made(20.0, 21, 4, 5, 6, 7, 8)], 2.5, victim=4)
    assert got["on"] == got["full"] == 20.008 - 2.5, "four new ones"
    assert got["again"] == 22, "21 to 42"
    assert got["noticed"] == got["on"], "no step failed, so it is noticed when the others are there"


def test_steps_lost_by_an_earlier_group_do_not_count_again() -> None:
    again = [*made(10.0, 1, 4, 5, 6, 7, 8), *made(11.0, 2, 4, 5, 6, 7, 8)]
    assert measured([*BEFORE, *again, *made(20.0, 1, 4, 9, 10, 11, 12)], 11.5, victim=8)["again"] == 2, "not 42"


def test_a_step_with_the_dead_process_is_not_of_a_new_group() -> None:
    after = made(2.6, 43, 4, 1, 2, 3)
    assert measured([*BEFORE, *after], 2.5, victim=4) == {"noticed": None, "on": None, "full": None, "again": None}


def test_a_step_counts_once_its_whole_group_has_made_it() -> None:
    assert [(s.t, s.step) for s in whole(sorted(BEFORE))] == [(1.004, 41), (2.004, 42)]


def test_incomplete_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "12").write_text("1.5 made 3 4\n1.6 ma")
    (tmp_path / "0.log").write_text("words\n")
    assert killing.rows(tmp_path) == [Row(1.5, "made", 3, 4, 12)]


def test_the_table_reports_processes_that_never_came_back() -> None:
    one: dict[str, Any] = {"noticed": 0.1, "on": 5.0, "full": 9.0, "again": 0, "load": 2.0}
    each = [one, {**one, "noticed": 0.3, "full": None}, {"never": "four did not train together"}]
    rows = table.rows([{"who": "torchft", "busy": True, "each": each}])
    assert rows == [["torchft", "yes", "2", "0.20, 0.30", "5.00, 5.00", "9.00, 9.00 (1 never)", "0, 0", "2, 2"]]
    assert table.section([]) == ""
