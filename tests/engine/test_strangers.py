"""A live lab and another user of the same machine, who may not hear, command, slow down or end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.stranger import NOBODY
from tests.waiting import until
from workbench.cluster.processes import alive
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.strategies import Gossip
from workbench.tasks import Digits

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
ROOT = hasattr(os, "getuid") and os.getuid() == 0
SECONDS = 15.0  # that the stranger tries
PRINTED = "what-a-cell-prints-{}"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A lab whose folders lie where everybody may look, as a home directory often does."""
    with tempfile.TemporaryDirectory(prefix="workbench-open-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", f"{folder}/runtime")
        monkeypatch.setenv("XDG_DATA_HOME", f"{folder}/data")
        with Lab(ranks=2, name="attacked") as made:
            yield made.wait(90)


def listeners(lab: Lab) -> list[int]:
    """The ports on which a process of the lab listens; all on the loopback."""
    processes = [psutil.Process(int(p[0])) for p in lab.cluster.place.read()["processes"] if alive(p[:2])]
    found = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {a.ip for a in found} == {"127.0.0.1"}
    return sorted({a.port for a in found})


def stepped(lab: Lab) -> int:
    return lab.status[0]["step"] or 0


@pytest.mark.skipif(not ROOT, reason="plays another user of the machine, which takes root")
def test_another_user_hears_nothing_and_the_run_trains_on(lab: Lab) -> None:
    folder = Path(os.environ["WORKBENCH_RUNTIME_DIR"]).parent
    run = lab.run(Experiment(task=Digits(), strategy=Gossip()), out=folder / "out")
    assert until(lambda: lab.state == "running" and stepped(lab) > 3, 60)
    printed = [PRINTED.format(n) for n in range(30)]
    keys = json.loads(lab.cluster.place.file.read_text())["keys"]
    asked = {"ports": listeners(lab), "folders": [str(folder), tempfile.gettempdir()], "seconds": SECONDS,
             "secrets": ["what-a-cell-prints", *keys]}  # fmt: skip
    script = Path(__file__).with_name("stranger.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], **pipes) as it:
        assert it.stdin and it.stdout
        print(json.dumps(asked), file=it.stdin, flush=True)
        assert it.stdout.readline() == "ready\n"
        for text in printed:
            assert lab.view.execute(f"print({text!r})").stdout == [f"{text}\n"] * 2
        assert it.stdout.readline() == "tried\n"
        before = stepped(lab)
        assert lab.set("strategy", "DDP").wait(60).applied_at is not None, "it is steered as ever"
        assert lab.set("strategy", "Gossip").wait(60).applied_at is not None
        assert until(lambda: stepped(lab) > before + 20, 60), "and trains on"
        print("", file=it.stdin, flush=True)
        got = json.loads(it.stdout.readline())
    assert (got["uid"], got["heard"]) == (NOBODY, []) and got["tries"] > 100
    assert [f for f in got["opened"] if Path(f).is_relative_to(folder)] == []
    assert lab._live.generation not in got["names"], "the run's name is in no name that others can list"
    assert lab.notes == [] and lab.state == "running"
    lab.stop()
    run.wait(60)
    every_step_counts(run)


def every_step_counts(run: Run) -> None:
    """No row of the run is missing, no rank left out a step, and the strangers are on the record."""
    assert (run.state, run.missing, run.warnings) == ("stopped", 0, ())
    steps = run.spans[run.spans["lane"] == "step"]
    for rank in (0, 1):
        mine = sorted(steps[steps["rank"] == rank]["step"])
        assert mine == list(range(len(mine))) and len(mine) > 20
    counted = run.samples[run.samples["name"] == "strangers"]
    assert counted["value"].sum() > 10
