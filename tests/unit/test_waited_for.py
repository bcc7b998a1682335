"""Tests the progress line of a run that the program waits for. It covers the whole run, whenever the waiting began."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from workbench.cluster.run import run_waiting
from workbench.experiment import Experiment


@pytest.mark.parametrize(("first", "made", "seconds"), [(0, 764, 52.0), (562, 570, 8.0)], ids=["whole", "resumed"])
def test_the_final_progress_line_covers_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, first: int, made: int, seconds: float
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(run_waiting, "seen", lambda: True)
    monkeypatch.setattr(run_waiting, "tqdm", lambda **rest: tqdm(file=out, **rest))
    run = SimpleNamespace(name="late", parent={"step": first} if first else {}, epoch=time.time() - seconds)
    live: Any = SimpleNamespace(run=run, changes=SimpleNamespace(experiment=Experiment()), steps_done=made,
                                state="stopped", loss=1.5, hang_monitor=SimpleNamespace(holdup=""),
                                cluster=None)  # fmt: skip
    with run_waiting._make_progress(live) as line:
        run_waiting._show_progress(live, line)
    last = out.getvalue().rpartition("\r")[2]
    found = re.search(r"late: (\d+)step \[00:(\d+), +([\d.]+)(step/s|s/step), stopped, loss 1.500\]", last)
    assert found, last
    took, pace = int(found[2]), float(found[3]) if found[4] == "step/s" else 1 / float(found[3])
    assert int(found[1]) == made and took >= int(seconds)
    assert 0.98 * (made - first) / (took + 1) < pace < 1.02 * (made - first) / took
