"""Tests the inspector of a live run: it profiles a rank and names a rank missing from a collective."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench import Experiment, Lab
from workbench.settings import KnobError

pytestmark = [pytest.mark.engine, pytest.mark.long]


def until(so: Callable[[], object], patience: float = 90.0) -> None:
    end = time.monotonic() + patience
    while not so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_is_profiled_and_a_frozen_one_is_reported_as_missing(tmp_path: Path) -> None:
    with Lab(2, name="inspected") as lab:
        run = lab.run(Experiment(ranks=2, steps=100_000, pace=20.0, eval_every=0), out=tmp_path / "run")
        until(lambda: run.made > 5)
        with pytest.raises(KnobError, match="must be one of those that train now: 0, 1"):
            run.profile(rank=2)
        path = run.profile(rank=1, steps=3)
        until(lambda: run.details("profile"))
        ((_, _, said),) = run.details("profile")
        assert said["path"] == str(path) and said["steps"] == 3 and path.parent == tmp_path / "run" / "profiles"
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert any(str(name).startswith("aten::") for name in names)
        until(lambda: run.made > said["first"] + 5)
        lab.freeze(1)
        until(lambda: len(run.entered()) and 1 in dict(run.entered().missing[0]))
        assert run.entered().entered[0] == (0,)
        lab.thaw(1)
        at = run.made
        until(lambda: run.made > at + 3)
        until(lambda: len(run.recording()) == 2)
        assert (run.recording().recording > 0).all() and run.clocks().error.tolist() == [0.0, 0.0]
        run.stop()
        run.wait(60)
