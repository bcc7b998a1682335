"""Checks that labs that open, run and close leak nothing, and that a lab closes without free descriptors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]

FULL = """
import os, resource, sys, time
from pathlib import Path
import psutil
from workbench import Digits, Experiment, Lab

def main():
    lab = Lab(ranks=2, name="full").wait(120)
    if sys.argv[1] == "detach":
        lab.detach()  # to have all modules
        lab = Lab.attach("full")
    run = lab.run(Experiment(task=Digits(hidden=16), ranks=2, eval_every=0), out=Path(sys.argv[2]))
    while run.made < 2:
        time.sleep(0.1)
    children = psutil.Process().children(recursive=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    getattr(lab, sys.argv[1])()
    for one in taken:
        os.close(one)
    living = [p.pid for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    print("living", len(living), "of", len(children), "place", lab.cluster.place.path.exists(), flush=True)
    if sys.argv[1] == "detach":
        Lab.attach("full").close()
        living = [p.pid for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        print("then living", len(living), flush=True)

if __name__ == "__main__":
    main()
"""


def run_python(*words: str, folder: Path, seconds: float = 400) -> str:
    """Returns the output of a Python process with its own lab folders. Fails unless the exit code is 0."""
    env = {"WORKBENCH_RUNTIME_DIR": str(folder / "runtime"), "XDG_DATA_HOME": str(folder / "data")}
    env = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True,
                          timeout=seconds, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_ten_cycles_of_open_run_and_close_leave_nothing(tmp_path: Path) -> None:
    out = tmp_path / "cycles.json"
    run_python("-m", "tests.cycles", "--cycles", "10", "--out", str(out), folder=tmp_path)
    rows = json.loads(out.read_text())["cycles"]
    assert len(rows) == 10 and {row["strategy"] for row in rows} >= {"DDP", "Hogwild", "ZeRO3", "LocalSGD", "TorchDDP"}
    assert [row["left"] for row in rows] == [{}] * 10


@pytest.mark.parametrize("what", ["close", "detach"])
def test_a_lab_ends_when_its_process_has_no_descriptor_left(what: str, tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    said = run_python(str(script), what, str(tmp_path / "run"), folder=tmp_path)
    if what == "close":
        assert said.startswith("living 0 of ") and "place False" in said
    else:
        assert not said.startswith("living 0 ") and "place True" in said and "then living 0" in said
