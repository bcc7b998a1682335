"""Tests notes about stuck ranks: updated, withdrawn, and absent if the machine slept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.cluster.observe.hang_monitor import HangMonitor
from workbench.cluster.run.rank_errors import RankError, align_death_steps
from workbench.experiment import Experiment
from workbench.record.store import Writer
from workbench.record.timeline import columns_of
from workbench.run import Run
from workbench.strategies import DDP, LocalSGD


class Watched:
    """A run of 4 ranks with a fake clock and fake answers."""

    def __init__(self, run: Run | None = None, fresh: bool = False) -> None:
        self.now, self.slept, self.notes = 100.0, 0.0, []
        self.run = run or Run({}, live=True)
        self.hang_monitor = HangMonitor(self.run, range(4), self.notes, lambda: self.now, lambda: self.slept)
        self.step = 0
        if not fresh:
            self.trained()

    def trained(self) -> None:
        """Ends one more step of 50 ms on every rank."""
        for rank in range(4):
            row = (rank, self.step, "step", "DDP", 0.0, 0.0, 0.05, 0)
            self.hang_monitor.take_rows("spans", rank, columns_of("spans", [row]))
        self.step += 1

    def second(self, *odd: int, op: str = "forward", mute: bool = True, state: str = "running", **more: Any) -> None:
        """Passes one second in which the ranks `odd` are stuck in `op`, and send nothing if `mute`."""
        self.now += 1.0
        still = self.now - 100.0
        for rank in range(4):
            if rank in odd and mute:
                continue
            waits = {"busy": "all_reduce bucket 0", "waits": bool(odd), "still": still if odd else 0.01}
            own = {"busy": op, "waits": False, "still": still}
            self.hang_monitor.take_status(rank, {"step": self.step, **(own if rank in odd else waits), **more})
        if not odd:
            self.trained()
        self.hang_monitor.find_stalls(state)


def test_a_silence_is_one_note_that_is_updated_and_withdrawn() -> None:
    w = Watched()
    for _ in range(3):
        w.second()
    for _ in range(9):
        w.second(2)
    assert w.notes == [] and w.hang_monitor.holdup.startswith("rank 2 has said nothing for 9 s"), (
        "said sooner in the line"
    )
    w.second(2)
    assert w.notes == [f"{w.hang_monitor.holdup}"] and "; 0, 1, 3 wait in all_reduce bucket 0" in w.notes[0]
    for _ in range(4):
        w.second(2)
    assert len(w.notes) == 1 and w.notes[0].startswith("rank 2 has said nothing for 14 s")
    w.second()
    assert w.notes == ["rank 2 stood still for 14 s and went on"] and w.hang_monitor.holdup == ""
    for _ in range(11):
        w.second(1)
    assert len(w.notes) == 2 and w.notes[1].startswith("rank 1 has said nothing")


def test_a_ranks_own_report_of_a_freeze_replaces_the_note() -> None:
    w = Watched()
    for _ in range(12):
        w.second(2)
    said = {"seconds": 12.3, "machine": False, "text": "stood still for 12.3 s: stopped"}
    w.hang_monitor.take_mark(2, 1, "stood still", said)
    w.second()
    assert w.notes == ["rank 2 stood still for 12.3 s: stopped (step 1)"]


def test_a_short_freeze_is_a_note_too() -> None:
    w = Watched()
    w.second()
    w.hang_monitor.take_mark(
        3, 7, "stood still", {"seconds": 5.1, "machine": False, "text": "stood still for 5.1 s: stopped"}
    )
    assert w.notes == ["rank 3 stood still for 5.1 s: stopped (step 7)"]


def test_no_rank_counts_as_silent_after_the_machine_slept() -> None:
    w = Watched()
    w.second()
    w.slept += 40.0  # the monotonic clock stands still during sleep
    w.second(2)
    assert w.notes == ["this machine slept for 40 s, this kernel and its ranks alike"]
    for _ in range(9):
        w.second(2)
    assert len(w.notes) == 1


def test_time_that_the_kernel_missed_is_reported_once_and_no_ranks_silence() -> None:
    w = Watched()
    w.second()
    w.now += 40.0  # the kernel was stopped without sleep, so all clocks go on
    for rank in range(4):
        text = {"seconds": 40.2, "machine": False, "text": "stood still for 40.2 s"}
        w.hang_monitor.take_mark(rank, 1, "stood still", text)
    w.second(0, 1, 2, 3)
    assert w.notes == ["this machine stood still for 40 s, this kernel and its ranks alike"]


@pytest.mark.parametrize("state", ["paused", "stopping", "failing"])
def test_no_rank_counts_as_silent_in_a_run_that_stands(state: str) -> None:
    w = Watched()
    for _ in range(60):
        w.second(2, state=state)
    w.second(2)
    assert w.notes == [] and w.hang_monitor.holdup == ""


def test_a_rank_that_sleeps_by_its_settings_is_not_silent() -> None:
    w = Watched()
    for _ in range(60):
        w.second(2, mute=False, asleep=True)
    assert w.notes == []


def test_the_first_step_and_an_evaluation_may_take_longer() -> None:
    w = Watched()
    evaluation = (0, 1, "eval", "evaluate", 0.0, 0.0, 20.0, 0)
    w.hang_monitor.take_rows("spans", 0, columns_of("spans", [evaluation]))
    for _ in range(60):
        w.second(0, op="evaluate", mute=False)
    assert w.notes == []
    fresh = Watched(fresh=True)
    for _ in range(25):
        fresh.second(2)
    assert fresh.notes == []


def test_rows_that_ranks_could_not_write_are_counted_and_reported() -> None:
    w = Watched()
    w.run.append("samples", 0, 0, columns_of("samples", [(0, n, "loss", 0.1, 1.0) for n in range(50)]))
    w.second(lost=0)
    for rank in (3, 1):
        text = "the record is not being written: No space left on device"
        w.hang_monitor.take_mark(rank, 4, "spool", {"error": "No space left on device", "lost": 7, "text": text})
    assert w.run.unwritten == 2 * 7, "at once, not when it is asked next"
    w.second(lost=7)
    w.second(lost=9)
    assert (w.run.unwritten, w.run.missing) == (4 * 9, 0), "they are here, so they are not missing"
    (note,) = w.notes
    assert note == (
        "ranks 1, 3: the record is not being written: No space left on device; 36 rows are not on disk so far, "
        "run.save('elsewhere') writes all rows that are shown here"
    )
    for rank in (3, 1):
        w.hang_monitor.take_mark(rank, 9, "spool", {"error": "", "lost": 9, "text": "again"})
    (note,) = w.notes
    assert note.startswith("the record is being written again; 36 rows are not on disk so far, run.save(")


def test_a_recovered_disk_without_losses_is_reported() -> None:
    w = Watched()
    w.run.append("samples", 0, 0, columns_of("samples", [(0, n, "loss", 0.1, 1.0) for n in range(70)]))
    w.hang_monitor.take_mark(2, 4, "spool", {"error": "the disk does not answer", "lost": 50, "text": "not written"})
    assert w.run.unwritten == 50 and "rank 2: the record is not being written: the disk does not answer" in w.notes[0]
    w.hang_monitor.take_mark(2, 9, "spool", {"error": "", "lost": 0, "text": "again"})
    assert w.run.unwritten == 0 and w.notes == ["the record is being written again, and no row is missing"]


def test_rows_missing_on_disk_are_counted_at_the_end(tmp_path: Path) -> None:
    run = Run({}, path=tmp_path / "run", live=True)
    run.save()
    w = Watched(run)
    rows = columns_of("samples", [(0, n, "loss", 0.1 * n, 1.0) for n in range(10)])
    run.append("samples", 0, 0, rows)
    writer = Writer(tmp_path / "run", "samples", 0)
    writer.append({k: v[:4] for k, v in rows.items()})
    writer.close()
    w.hang_monitor.take_mark(0, 4, "spool", {"error": "No space left on device", "lost": 3, "text": "not written"})
    w.hang_monitor.record_monitor.count_lacking()
    assert run.unwritten == 6 and w.notes == [
        f"the record in {tmp_path / 'run'} ends without 6 rows of this run; "
        "run.save('elsewhere') writes all rows that are shown here"
    ]


def test_saving_a_live_run_elsewhere_keeps_its_folder(tmp_path: Path) -> None:
    run = Run({}, path=tmp_path / "run", live=True)
    run.save()
    run.append("samples", 0, 3, columns_of("samples", [(0, 7, "loss", 0.1, 1.0)]))
    assert run.save(tmp_path / "copy") == tmp_path / "copy" and run.path == tmp_path / "run"
    copy = Run.open(tmp_path / "copy")
    assert len(copy.samples) == 1 and copy.missing == run.missing == 3, "what was lost stays known"
    run.live = False
    run.save(tmp_path / "last")
    assert run.path == tmp_path / "last"


def test_a_run_directory_that_vanishes_is_reported_once(tmp_path: Path) -> None:
    run = Run({}, path=tmp_path / "run", live=True)
    run.save()
    w = Watched(run)
    w.second()
    assert w.notes == []
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run").rmdir()
    w.second()
    w.second()
    assert len(w.notes) == 1 and f"the run directory {tmp_path / 'run'} is gone" in w.notes[0]


def test_a_death_is_placed_by_the_latest_answer_or_row() -> None:
    w = Watched()
    w.hang_monitor.take_status(1, {"step": 1, "busy": "all_reduce bucket 0"})
    assert w.hang_monitor.find_place(1) == (1, "all_reduce bucket 0")
    w.now += 0.5
    rows = [(1, step, "step", "DDP", 0.0, 0.0, 0.1, 0) for step in range(1, 5)]
    w.hang_monitor.take_rows("spans", 1, columns_of("spans", rows))
    assert w.hang_monitor.find_place(1) == (5, "")
    w.now += 0.1
    w.hang_monitor.take_rows("spans", 1, columns_of("spans", [(1, 5, "compute", "forward", 0.0, 0.0, 0.1, 0)]))
    assert w.hang_monitor.find_place(1) == (5, "after forward")
    w.now += 0.1
    w.hang_monitor.take_status(1, {"step": 5, "busy": "backward"})
    assert w.hang_monitor.describe_death(1, "is gone")["op"] == "backward" and w.hang_monitor.find_place(1)[0] == 5


@pytest.mark.parametrize(("strategy", "step"), [(DDP(), 5), (LocalSGD(every=8), 3)])
def test_a_dead_ranks_step_is_the_one_in_which_other_ranks_missed_it(strategy: Any, step: int) -> None:
    dead = {"rank": 2, "step": 3, "op": "update", "type": "EngineDied", "text": "its engine is gone"}
    freed = {"step": 5, "op": "all_reduce", "type": "RuntimeError", "text": "Connection closed by peer"}
    errors = {2: dead, 0: {**freed, "rank": 0}, 1: {**freed, "rank": 1}}
    align_death_steps(errors, Experiment(ranks=3, strategy=strategy))
    error = RankError(list(errors.values()))
    assert (error.rank, error.step, error.freed) == (2, step, [0, 1])


def test_a_rank_that_hangs_in_set_up_is_named() -> None:
    w = Watched(fresh=True)
    for _ in range(40):
        w.second(2, op="set-up", mute=False, state="starting")
    assert "rank 2 has been in set-up" in w.hang_monitor.holdup and "0, 1, 3 wait" in w.hang_monitor.holdup


def test_the_start_of_engines_does_not_count_as_a_stopped_kernel() -> None:
    w = Watched()
    w.now += 8.0
    w.hang_monitor.start_watch()
    w.second()
    w.now += 1.0
    w.hang_monitor.take_mark(1, 3, "stood still", {"seconds": 5.0, "text": "was stopped for 5 s"})
    assert w.notes == ["rank 1 was stopped for 5 s (step 3)"]


def took(w: Watched, seconds: float, name: str = "forward") -> None:
    """Records an earlier operation of this duration on rank 2."""
    row = (2, w.step, "compute", name, 0.0, 0.0, seconds, 0)
    w.hang_monitor.take_rows("spans", 2, columns_of("spans", [row]))


@pytest.mark.parametrize(("before", "after", "named_at"), [
    (0.05, 0.0, 10), (0.05, 4.0, 4), (1.5, 4.0, 8), (3.0, 0.0, 15)
])  # fmt: skip
def test_a_rank_hangs_after_a_limit_that_depends_on_earlier_durations(
    before: float, after: float, named_at: int
) -> None:
    w = Watched()
    heard: list[Any] = []
    w.hang_monitor.hang_after = lambda: after
    w.hang_monitor.report_stall = lambda found, fresh: heard.append((found.stalled_ranks, fresh))
    took(w, before)
    for _ in range(named_at - 1):
        w.second(2, mute=False)
    assert heard == []
    w.second(2, mute=False)
    assert heard == [((2,), True)]
    w.second(2, mute=False)
    assert heard[1:] == [((2,), False)]


def test_the_limit_for_steps_does_not_apply_before_the_first_step() -> None:
    w = Watched(fresh=True)
    w.hang_monitor.hang_after = lambda: 2.0
    for _ in range(29):
        w.second(2, mute=False)
    assert w.notes == []
    w.second(2, mute=False)
    assert w.notes and w.notes[0].startswith("rank 2 has been in forward of step 0 for 30 s")


def test_the_limit_for_steps_does_not_apply_to_a_first_evaluation() -> None:
    w = Watched()
    w.hang_monitor.hang_after = lambda: 2.0
    for _ in range(29):
        w.second(2, op="evaluate", mute=False)
    assert w.notes == []


def test_only_a_silent_ranks_process_is_inspected() -> None:
    w = Watched()
    asked: list[int] = []
    w.hang_monitor.describe_process = lambda rank: asked.append(rank) or "its process is stopped"  # type: ignore[func-returns-value]
    for _ in range(11):
        w.second(2)
    assert set(asked) == {2} and "(its process is stopped" in w.notes[0]
