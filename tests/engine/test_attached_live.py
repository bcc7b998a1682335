"""A lab that another kernel takes over while its ranks come and go: it goes on as the first one would have."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deaths import kill
from tests.labs import BOUND, apart, endless, reached
from tests.waiting import until
from workbench.engine.record.spool import EVERY
from workbench.lab import Lab

pytestmark = pytest.mark.engine


def members(lab: Lab) -> tuple[int, ...]:
    return lab._live.members if lab._live else ()


def late(seconds: float) -> None:
    """On an engine: its disk gets rows so many seconds after they were sent."""
    from workbench.engine.record import spool

    spool.EVERY = seconds


def test_what_was_sent_before_is_seen_at_once_though_the_disk_is_late(tmp_path_factory: pytest.TempPathFactory) -> None:
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


@pytest.mark.parametrize("disk", [EVERY, 600.0], ids=["disk in time", "late disk"])
def test_others_come_for_who_was_lost_while_no_kernel_was_there(
    tmp_path_factory: pytest.TempPathFactory, disk: float
) -> None:
    """One for whom an engine is idle, and one for whom the kernel that attaches has to start one.

    late disk: nothing is left of what rank 0 told, not even that the run trains
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
