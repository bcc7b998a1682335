"""Ends engines, or their server, while ranks train: they end at once, and no process aborts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.labs import apart, endless, reached
from tests.waiting import until
from workbench.cluster.processes.fork_server import can_fork
from workbench.lab import Lab
from workbench.strategies import DDP

pytestmark = pytest.mark.engine


def test_an_engine_that_is_ended_while_its_rank_trains_does_not_abort(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The signal almost always meets the rank inside torch. The normal clean-up must still happen."""
    with apart(tmp_path_factory) as patch:
        folder = tmp_path_factory.mktemp("shared")
        patch.setenv("TMPDIR", str(folder))
        with Lab(ranks=4, name="ended") as lab:
            lab.wait(120).run(endless(ranks=4, strategy=DDP(), pace=0.0))
            reached(lab, 5)
            owned, place = lab.cluster.processes, lab.cluster.place
            assert owned is not None
            place.write_state(ends=True)  # otherwise the lab treats this as a preemption, and the ranks leave first
            children = [owned.started[f"engine {number}"] for number in range(4)]
            for child in children:
                child.send_signal(signal.SIGTERM)
            assert [child.wait(60) for child in children] == [128 + signal.SIGTERM] * 4
            logs = [(Path(place.path) / "log" / f"engine-{number}.log").read_text() for number in range(4)]
            assert not any("Traceback" in log or "Fatal" in log for log in logs), logs
            assert not list(folder.glob("workbench-*")), "where the ranks met"


@pytest.mark.skipif(not can_fork(), reason="engines are no forks here")
def test_a_run_outlives_the_server_that_its_engines_are_forks_of(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without the server, the lab only learns that an engine ended. The replacement is a fork of another server."""
    with apart(tmp_path_factory), Lab(ranks=2, name="unparented") as lab:
        lab.wait(120).run(endless(ranks=2, strategy=DDP(), on_death="replace"))
        reached(lab, 5)
        owned, pid = lab.cluster.processes, lab.status[1]["pid"]
        assert owned is not None
        server = owned.started["engines"]
        server.kill()
        server.wait(60)
        assert lab._live is not None
        reached(lab, lab._live.step + 5)
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: lab.members == (0, 2), 120), lab.notes
        assert any(f"(pid {pid}) is gone" in note for note in lab.notes), lab.notes
        reached(lab, lab._live.step + 5)
        assert owned.started["engines"] is not server and lab.state == "running"


def test_an_old_engine_may_end_after_its_lab_has_closed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """After a script or a loop, a thread of its own ends the run's engines. The lab may close before it is done."""
    with apart(tmp_path_factory):
        with Lab(ranks=1, name="closed-first") as lab:
            health, engines = lab.wait(120).cluster.health, list(lab.cluster.engines)
        health.retire_engines(engines)
    assert not any(map(psutil.pid_exists, [engine.pid for engine in engines]))
