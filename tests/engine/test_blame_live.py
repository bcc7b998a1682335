"""Checks on real ranks that lateness, advice and hang reports name the rank that causes a wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs import BOUND, shared_lab
from tests.waiting import until
from workbench import Digits, Experiment
from workbench.experiment import user_input
from workbench.lab import Lab
from workbench.run import Run

pytestmark = pytest.mark.engine

SLOW = """
import time, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(24):
    if dist.get_rank() == 1:
        time.sleep(0.1)  # its data come late
    optimizer.zero_grad()
    model(torch.ones(16, 64)).square().mean().backward()
    optimizer.step()
"""

SKIPPED = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for step in range(10):
    loss = model(torch.ones(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not (step == 5 and dist.get_rank() == 1):
        dist.all_reduce(torch.ones(1))
"""


lab = shared_lab(2, "blame")


@pytest.mark.parametrize("strategy", ["TorchDDP", "DDP"])
def test_the_rank_that_loads_slowly_is_late_and_advice_says_so(strategy: str, lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = lab.run(
        user_input.script(str(tmp_path / "slow.py")).set({"ranks": 2, "strategy": strategy}), out=tmp_path / "run"
    )
    run.wait(BOUND)
    late = run.lateness().mean(axis=1)
    assert late[1] > 0.05 and late[0] < -0.05, late
    told = run.advice()
    assert told[0].cause == "input" and told[0].ranks == (1,), told
    assert not [row for row in told if row.cause == "input" and not row.ranks], "rank 0 reads its data at once"


def test_the_rank_that_skipped_a_collective_is_named_with_the_line(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "skipped.py").write_text(SKIPPED)
    e = user_input.script(str(tmp_path / "skipped.py")).set({"ranks": 2, "hang_after": 4.0})
    run = lab.run(e, out=tmp_path / "run")
    line = SKIPPED.splitlines().index("        dist.all_reduce(torch.ones(1))") + 1
    assert until(lambda: run.details("hang"), BOUND), (lab.notes, lab.status)
    (_, _, said), *_ = run.details("hang")
    assert said["ranks"] == [1], said
    assert f"rank 1 went past all_reduce at skipped.py:{line} of step 6, in which rank 0 waits" in said["text"]
    lab.abort()
    run.wait(BOUND)


LEAKING = SLOW.replace("time.sleep(0.1)  # its data come late", "kept.append(torch.ones(4 << 20))").replace(
    "for step in", "kept = []\nfor step in"
)


def test_a_rank_whose_memory_grows_is_named(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING.replace("range(24)", "range(60)"))
    run = lab.run(user_input.script(str(tmp_path / "leaking.py")).set("ranks", 2), out=tmp_path / "run")
    run.wait(BOUND)
    ((_, _, said),) = run.details("memory grows")
    assert said["rank"] == 1 and 12 < said["mb_per_step"] < 22, "16 MiB a step"
    assert said["text"] in lab.notes and said["text"] in run.warnings
    assert said["text"] in Run.open(tmp_path / "run").warnings


def test_lateness_under_torchs_own_ddp_says_why_it_is_empty(lab: Lab, tmp_path: Path) -> None:
    run = lab.run(Experiment(task=Digits(hidden=16), ranks=2, steps=8, strategy="TorchDDP"), out=tmp_path / "run")
    run.wait(BOUND)
    late = run.lateness()
    assert late.shape == (2, 8) and late.isna().all(axis=None)
    assert "torch itself performs the exchange of TorchDDP" in late.attrs["why"] and late.attrs["why"] in repr(late)
