"""Runs a lab with scarce resources: a /dev/shm of 64 KB, 1,100 open descriptors per process, no memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = '''
import json, os, resource, sys, time
sys.path.insert(0, sys.argv[1])
where = sys.argv[2]

import cloudpickle
import torch
from torch import nn
from workbench import Change, Experiment, Lab, Link, Fabric
from workbench.tasks import Task

def opens():
    """1,100 files more, which stay open."""
    import os, resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    globals()["kept"] = [open("/dev/null") for _ in range(1100)]
    return max(int(fd) for fd in os.listdir("/proc/self/fd"))

def data(rank, ranks, seed):
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 8, generator=rng), torch.randn(8, 4, generator=rng)) for _ in range(64)]

def loss(model, pair):
    time.sleep(0.005)
    return nn.functional.mse_loss(model(pair[0]), pair[1])

def greedy(model, pair, steps=[0], kept=[]):
    import threading
    steps[0] += 1
    while steps[0] > 5 and threading.current_thread().name.startswith("rank 1"):
        kept.append(bytearray(10**7))
    return loss(model, pair)

def task(loss):
    return Task(model=lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)), data=data, loss=loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.01))

if __name__ == "__main__":
    said = {"shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, "kernel": opens()}
    with Lab(ranks=2, name="scarce") as lab:
        said["engines"] = lab.view.apply_sync(opens)
        changes = [Change(5, "strategy", "Hogwild"), Change(10, "strategy", "DDP"), Change(12, "compressor", "TopK"),
                   Change(14, "compressor", "Dense"), Change(15, "strategy", "AsyncServer"),
                   Change(25, "strategy", "DDP")]
        fast = Fabric(link=Link(bandwidth=1000.0))
        run = lab.run(Experiment(task=task(loss), steps=40, fabric=fast), changes).wait(120)
        said["state"], said["missing"], said["notes"] = run.state, run.missing, list(lab.notes)
        said["applied"] = len(run.changes)
        said["set"] = lab.run(Experiment(task=task(loss))) and lab.set("lr", 0.02).wait(60).applied_at
        lab.stop()
        lab.run_now.wait(60)
        if where:
            open(where + "/cgroup.procs", "w").write(str(lab.status[1]["pid"]))
            lab.run(Experiment(task=task(greedy)))
            try:
                lab.run_now.wait(120)
            except Exception as error:
                said["error"], said["rank"], said["step"] = str(error), error.rank, error.step
            said["again"] = lab.run(Experiment(task=task(loss), steps=3)).wait(120).state
    print("SAID " + json.dumps(said))
'''


@pytest.fixture(scope="module")
def cgroup() -> Any:
    """Yields a memory cgroup of 500 MB, or "" if none can be made."""
    made = Path("/sys/fs/cgroup/memory") / f"workbench-lab-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text("500000000")
    except OSError:
        yield ""
        return
    yield str(made)
    made.rmdir()


@pytest.fixture(scope="module")
def said(cgroup: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the observations of the lab's script."""
    here = tmp_path_factory.mktemp("scarce")
    (here / "kernel.py").write_text(SCRIPT)
    kernel = f"exec {sys.executable} {here / 'kernel.py'} {Path.cwd()} '{cgroup}'"
    command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=64k none /dev/shm && {kernel}"]
    env = {**os.environ, "XDG_DATA_HOME": str(here), "WORKBENCH_RUNTIME_DIR": str(here), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    if not lines and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip("no file system can be mounted here")
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0][5:])
    return found


def test_a_small_shared_memory_and_more_than_1024_descriptors_do_no_harm(said: dict[str, Any]) -> None:
    assert said["shm"] == 65536 and min(said["kernel"], *said["engines"]) > 1100
    assert (said["state"], said["missing"], said["notes"], said["applied"]) == ("done", 0, [], 6)
    assert said["set"] >= 0


def test_a_rank_killed_for_lack_of_memory_is_reported_with_the_cause(said: dict[str, Any]) -> None:
    if "error" not in said:
        pytest.skip("no memory cgroup of version 1 can be made here")
    assert said["rank"] == 1 and said["step"] == 5, said["error"]
    assert "the system ended it for lack of memory (its cgroup may have 500 MB); take a smaller batch" in said["error"]
    assert said["again"] == "done", "the next run gets new engines"
