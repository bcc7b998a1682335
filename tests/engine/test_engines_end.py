"""Engines that are told to end while their ranks train: they end as told, at once, and nothing of them aborts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.labs import apart, endless, reached
from workbench.lab import Lab
from workbench.strategies import DDP

pytestmark = pytest.mark.engine


def test_an_engine_that_is_ended_while_its_rank_trains_does_not_abort(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its rank is in torch, as good as always; what it would have tidied up at an exit is."""
    with apart(tmp_path_factory) as patch:
        folder = tmp_path_factory.mktemp("shared")
        patch.setenv("TMPDIR", str(folder))
        with Lab(ranks=4, name="ended") as lab:
            lab.wait(120).run(endless(ranks=4, strategy=DDP(), pace=0.0))
            reached(lab, 5)
            owned, place = lab.cluster.owned, lab.cluster.place
            assert owned is not None
            place.write(ends=True)  # else this would be a preemption, after which they leave first
            children = [owned.started[f"engine {number}"] for number in range(4)]
            for child in children:
                child.send_signal(signal.SIGTERM)
            assert [child.wait(60) for child in children] == [128 + signal.SIGTERM] * 4
            logs = [(Path(place.path) / "log" / f"engine-{number}.log").read_text() for number in range(4)]
            assert not any("Traceback" in log or "Fatal" in log for log in logs), logs
            assert not list(folder.glob("workbench-*")), "where the ranks met"
