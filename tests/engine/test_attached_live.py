"""Checks that a lab works as before after another kernel takes it over while its ranks come and go."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deaths import kill
from tests.labs import BOUND, apart, endless, reached
from tests.waiting import until
from workbench.engine.record.row_spool import WRITE_INTERVAL
from workbench.lab import Lab

pytestmark = pytest.mark.engine


def members(lab: Lab) -> tuple[int, ...]:
    return lab._live.members if lab._live else ()


def late(seconds: float) -> None:
    """Runs on an engine: rows reach its disk `seconds` after the rank sent them."""
    from workbench.engine.record import row_spool as spool

    spool.WRITE_INTERVAL = seconds


def test_an_attached_kernel_sees_earlier_rows_despite_a_late_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    with apart(tmp_path_factory):
        lab = Lab(ranks=2, name="late disk").wait(120)
        try:
            lab.view.apply_sync(late, 600.0)
            lab.run(endless())
            reached(lab, 5)
            lab.detach()
            lab = Lab.attach("late disk")
            assert lab.state == "running" and lab.run_now is not None
            assert {int(rank) for rank in lab.run_now.spans["rank"]} == {0, 1} and lab.run_now.spans["step"].max() >= 5
        finally:
            lab.close()


def test_nobody_is_replaced_again_and_the_run_is_resized(tmp_path_factory: pytest.TempPathFactory) -> None:
    with apart(tmp_path_factory):
        lab = Lab(ranks=4, name="taken over").wait(120)
        try:
            lab.run(endless(ranks=2, on_death="replace"))
            reached(lab, 5)
            kill(lab, 1)
            assert until(lambda: members(lab) == (0, 2), BOUND), lab.notes
            lab.detach()
            lab = Lab.attach("taken over")
            assert members(lab) == lab.members == (0, 2)
            assert lab.set("bucket_mb", 2.0).wait(BOUND).applied_at is not None
            came = lab.resize(3).wait(BOUND)
            assert came.applied_at is not None and members(lab) == (0, 2, 3)
            reached(lab, came.applied_at + 5)
            assert members(lab) == (0, 2, 3), "nobody else has come"
            lab.stop()
            assert lab.run_now is not None and lab.run_now.wait(BOUND).state == "stopped"
        finally:
            lab.close()


@pytest.mark.parametrize("disk", [WRITE_INTERVAL, 600.0], ids=["disk in time", "late disk"])
def test_an_attaching_kernel_replaces_ranks_lost_while_no_kernel_was_attached(
    tmp_path_factory: pytest.TempPathFactory, disk: float
) -> None:
    """One lost rank gets an idle engine. For another one, the attaching kernel starts an engine.

    With a late disk, no report of rank 0 is left, not even that the run trains.
    """
    with apart(tmp_path_factory):
        lab = Lab(ranks=4, name="left alone").wait(120)
        try:
            lab.view.apply_sync(late, disk)
            lab.run(endless(ranks=3, on_death="replace"))
            reached(lab, 5)
            pids = [row["pid"] for row in lab.status]
            lab.detach()
            for rank in (0, 2):
                os.kill(pids[rank], signal.SIGKILL)
            lab = Lab.attach("left alone")
            assert until(lambda: members(lab) == (1, 3, 4), BOUND), (members(lab), lab.notes)
            assert lab.status[4]["pid"] not in pids
            step = lab._live.step if lab._live else 0
            reached(lab, step + 5)
            lab.detach()
            lab = Lab.attach("left alone")
            assert members(lab) == (1, 3, 4) and lab.resize(2).wait(BOUND).applied_at is not None
            assert members(lab) == (1, 3), "nobody comes again, nor for who was taken out"
            lab.stop()
            assert lab.run_now is not None and lab.run_now.wait(BOUND).state == "stopped"
        finally:
            lab.close()
